"""Exponentials, hyperbolic tangents and the like of the elements of a tensor, where a core takes longer for them than
for its memory: seconds of an element, forward and backward. Copies in another order of memory have theirs, too. So have
layer norms (``layer_norm``, and ``normalised_row`` of each row) and what attention takes for a score beside its kernel,
which has no dropout and no gradient of a mask (``dropped_score``, ``biased_score``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

FunctionName = Literal[
    "biased_score", "cos", "dropped_score", "elu", "erf", "exp", "gelu", "gelu_tanh", "layer_norm", "log",
    "log_softmax", "mish", "normalised_row", "sigmoid", "silu", "sin", "softmax", "softplus", "tanh", "transposed",
    "transposed_1024", "transposed_4096",
]  # fmt: skip

FUNCTIONS: tuple[FunctionName, ...] = get_args(FunctionName)

# Of a GELU by tanh, where that alone was measured: on a core with AVX-512, of the mean of both passes.
_OVER_GELU: Mapping[FunctionName, float] = {
    "elu": 0.7,
    "erf": 0.8,
    "exp": 0.25,
    "gelu": 0.4,
    "gelu_tanh": 1.0,
    "log": 0.7,
    "log_softmax": 0.5,
    "mish": 2.5,
    "sigmoid": 0.3,
    "silu": 0.3,
    "softmax": 0.4,
    "softplus": 0.75,
    "tanh": 0.3,
}


def transposed(apart: int) -> FunctionName:
    """The name of a copy that reads elements with a stride of ``apart`` bytes.

    Cache lines that are a multiple of 4,096 bytes apart map to one set of a core's first-level cache and evict each
    other before their other elements are read (conflict misses). Of multiples of 1,024 there are four such sets.
    """
    return "transposed_4096" if apart % 4096 == 0 else "transposed_1024" if apart % 1024 == 0 else "transposed"


class ElementTime(NamedTuple):
    """Seconds of an element."""

    forward_s: float = 0.0
    backward_s: float = 0.0


Functions = tuple[tuple[FunctionName, ElementTime], ...]


def by_gelu(seconds: float) -> Functions:
    """What functions take on a core that takes ``seconds`` for a GELU by tanh."""
    return tuple((name, ElementTime(share * seconds, share * seconds)) for name, share in _OVER_GELU.items())


def slowest(each: Iterable[Functions]) -> Functions:
    """The longest time of each function."""
    found: dict[FunctionName, ElementTime] = {}
    for functions in each:
        for name, own in functions:
            found[name] = ElementTime(*map(max, own, found.get(name, ElementTime())))
    return tuple(found.items())
