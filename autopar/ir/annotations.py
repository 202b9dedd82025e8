"""Shardings that the user fixes: ``autopar.constrain``. The search completes the rest.

    class Model(nn.Module):                                          # a tensor, inside the model
        def forward(self, x):
            x = autopar.constrain(self.up(x), {"tp": Shard(2)})

    fixed = autopar.constrain("*.q_proj.weight", {"tp": Shard(0)})   # parameters, by pattern
    autopar.parallelize(model, 8, tp=4, annotations=[fixed])

Inside a model it is an op of its own, the identity outside of autopar, so that a capture records it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import overload

import torch
from torch import Tensor

from autopar.ir.errors import InvalidInput
from autopar.ir.placement import Placement, Replicate, Shard

# Mesh axis -> dimension that is sharded on it, None for replicated. An axis that is left out is left to the search.
FixedLayout = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAnnotation:
    """Placements of all parameters whose name matches ``pattern`` (``*`` and ``?`` as in file names)."""

    pattern: str
    layout: FixedLayout

    def matches(self, names: tuple[str, ...]) -> bool:
        """Whether the pattern matches any of these names of a parameter."""
        return any(fnmatchcase(name, self.pattern) for name in names)

    def __str__(self) -> str:
        return f"constrain({self.pattern!r}, {layout_text(self.layout)})"


@overload
def constrain(target: Tensor, placements: Mapping[str, Placement]) -> Tensor: ...
@overload
def constrain(target: str, placements: Mapping[str, Placement]) -> ParameterAnnotation: ...
def constrain(target: Tensor | str, placements: Mapping[str, Placement]) -> Tensor | ParameterAnnotation:
    """Fix how a tensor, or every parameter that a pattern matches, is laid out over mesh axes.

    target: a tensor inside the forward of a model; returned with the same values. Or a pattern of parameter names;
        what is returned goes to ``parallelize(..., annotations=[...])`` or ``search``.
    placements: mesh axis -> ``Shard(dim)`` or ``Replicate()``; axes that are left out are left to the search. The
        axes must be pinned: degrees (``tp=4`` makes the axis "tp") or a DeviceMesh with names.

    Raises InvalidInput for other placements or dimensions that the tensor does not have.
    """
    if isinstance(target, str):
        return ParameterAnnotation(pattern=target, layout=_fixed(placements, None))
    layout = _fixed(placements, target.dim())
    annotated: Tensor = torch.ops.autopar.constrain(target, layout_text(layout))
    return annotated


def _fixed(placements: Mapping[str, Placement], rank: int | None) -> FixedLayout:
    fixed: list[tuple[str, int | None]] = []
    for axis, placement in placements.items():
        if isinstance(placement, Replicate):
            fixed.append((axis, None))
        elif isinstance(placement, Shard) and (rank is None or -rank <= placement.dim < rank):
            fixed.append((axis, placement.dim if rank is None else placement.dim % rank))
        else:
            dims = "" if rank is None else f" of a dimension from {-rank} to {rank - 1}"
            raise InvalidInput(f"constrain: {axis!r} is {placement}; expected Replicate() or Shard(dim){dims}")
    return tuple(sorted(fixed, key=lambda item: item[0]))


def layout_text(layout: FixedLayout) -> str:
    """``tp=0 dp=*``: what ``parse_layout`` reads; ``*`` is replicated."""
    return " ".join(f"{axis}={'*' if dim is None else dim}" for axis, dim in layout)


def parse_layout(text: str) -> FixedLayout:
    """The layout that ``layout_text`` wrote, or that was typed so. Raises InvalidInput."""
    fixed: list[tuple[str, int | None]] = []
    for word in text.split():
        axis, equals, dim = word.partition("=")
        if not axis or not equals or not (dim == "*" or dim.removeprefix("-").isdigit()):
            raise InvalidInput(
                f"{word!r} is no placement; expected AXIS=DIM, or AXIS=* for replicated, as in tp=0 dp=*"
            )
        fixed.append((axis, None if dim == "*" else int(dim)))
    return tuple(sorted(fixed, key=lambda item: item[0]))


def parse_annotation(text: str) -> ParameterAnnotation:
    """``*.up.weight: tp=0 dp=*``. Raises InvalidInput."""
    pattern, colon, layout = text.partition(":")
    if not colon or not pattern.strip() or not layout.strip():
        raise InvalidInput(f"{text!r} is no constraint; expected PATTERN: AXIS=DIM ..., as in '*.up.weight: tp=0'")
    return ParameterAnnotation(pattern=pattern.strip(), layout=parse_layout(layout))


@torch.library.custom_op("autopar::constrain", mutates_args=())
def _constrain(x: Tensor, layout: str) -> Tensor:
    return x.clone()


@_constrain.register_fake
def _(x: Tensor, layout: str) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


_constrain.register_autograd(_backward)

CONSTRAIN = torch.ops.autopar.constrain.default
"""The op that a capture records."""
