"""Calls of autograd functions during a trace: each is one node, whose results are known from a run apart from it.

y = Reverse.apply(x, 0.5)      in the trace:  function((x,), number=3)      call 3: ``Reverse`` with 0.5
                               afterwards:    Reverse(x, 0.5)               (``functionalise``)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.autograd.function_op import FunctionOp, names_in
from autopar.ir.autograd.trial import Trial, try_function
from autopar.ir.capture.module_equality import plain, shape_key
from autopar.ir.errors import CaptureError
from autopar.ir.source import line_of_code
from autopar.ir.torch_private import pytree
from autopar.ir.torch_private_symbols import is_symbolic


@torch.library.custom_op("autopar::function", mutates_args=())
def _function(given: Sequence[Tensor], number: int) -> list[Tensor]:
    raise AssertionError("this op stands for a function in a trace and is never run")


@_function.register_fake
def _(given: Sequence[Tensor], number: int) -> list[Tensor]:
    results = _current.get().calls[number].results
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=given[0].device) for t in results]


def _zeros(ctx: Any, *grads: Any) -> tuple[Any, None]:
    return [torch.zeros(shape, dtype=dtype) if needs else None for shape, dtype, needs in ctx.given], None


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.given = [(t.shape, t.dtype, t.requires_grad) for t in inputs[0]]


# A trace asks whether a tensor has a gradient, and never for its values.
_function.register_autograd(_zeros, setup_context=_remember)

FUNCTION = torch.ops.autopar.function.default
# A hook changes the gradient of a tensor that nothing reads any more.
fx.node.has_side_effect(FUNCTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A distinct call. op: what runs. arguments: of its node, with None for tensors at the positions ``tensors``.

    results: on no device.
    """

    op: FunctionOp
    arguments: tuple[Any, ...]
    tensors: tuple[int, ...]
    results: tuple[Tensor, ...]

    def filled(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the node with ``given`` for tensors."""
        supply = dict(zip(self.tensors, given, strict=True))
        return tuple(supply.get(place, argument) for place, argument in enumerate(self.arguments))


@dataclass(slots=True)
class Recording:
    """The distinct calls of one trace, by number. differentiates: forward takes derivatives."""

    calls: list[Recorded] = field(default_factory=list)
    differentiates: bool = False
    _trials: dict[Hashable, tuple[int, Trial]] = field(default_factory=dict)

    def refuse_reading(self, changed: Sequence[str]) -> None:
        """Raise CaptureError if a function reads a global or an attribute of a class that forward changes."""
        for name in (name for name in changed if not name.startswith("self")):
            for function in dict.fromkeys(recorded.op.function for recorded in self.calls):
                if name.rpartition(".")[2] in names_in(function):
                    raise CaptureError(
                        f"the model cannot be captured: the autograd function {function.__name__} reads {name}, which "
                        f"forward changes.\n  forward: {line_of_code(function.forward)}\n"
                        "  try: passing it to apply as an argument"
                    )

    def call(self, function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
        """In place of ``function.apply(*args)``, one of whose tensors requires a gradient."""
        leaves, spec = pytree.tree_flatten(args)
        if any(is_symbolic(size) for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape):
            raise TypeError(f"the autograd function {function.__name__} is captured on tensors of one shape")
        key = (
            function,
            str(spec),
            tuple(("tensor", shape_key(leaf)) if isinstance(leaf, Tensor) else plain(leaf) for leaf in leaves),
        )
        if key not in self._trials:
            trial = try_function(function, leaves, spec)
            places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
            arguments = tuple(None if place in places else a for place, a in enumerate(trial.arguments))
            recorded = Recorded(op=trial.op, arguments=arguments, tensors=places, results=trial.results)
            self._trials[key] = len(self.calls), trial
            self.calls.append(recorded)
        number, trial = self._trials[key]
        # Of tensors in lists autograd knows nothing.
        direct = {id(arg) for arg in args if isinstance(arg, Tensor)}
        given = [
            leaf if id(leaf) in direct and place not in trial.unreached else leaf.detach()
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        ]
        made = FUNCTION(given, number)
        made = [result.detach() if place in trial.without_gradient else result for place, result in enumerate(made)]
        for place, position in trial.written.items():
            leaves[position].copy_(made[place])
            made[place] = leaves[position]
        supply = iter(made)
        return pytree.tree_unflatten(
            [next(supply) if is_tensor else leaf for is_tensor, leaf in trial.template], trial.out_spec
        )


_current: ContextVar[Recording] = ContextVar("autopar calls of autograd functions in the trace")


@contextmanager
def recorded() -> Iterator[Recording]:
    """Within, a trace may hold calls; they belong to the recording."""
    token = _current.set(recording := Recording())
    try:
        yield recording
    finally:
        _current.reset(token)


def current_recording() -> Recording:
    """That of the trace that runs."""
    return _current.get()
