"""Weights that ZeRO gathers in 8 bits, as products read nothing else of them (``ir.analysis.narrow_weights``).

    once a call      largest magnitude of each parameter here  ── one all-reduce ──>  of the whole of each
    each gather      piece, float32  ── cast, quantised by that ──>  8 bits  ── all_gather ──>  NarrowTensor

FSDP takes what it gathers from the tensor that holds a piece, if that has ``fsdp_pre_all_gather``, and what blocks read
from ``fsdp_post_all_gather`` (its extension for subclasses of tensors, which looks the two up by name). A parameter
stays a plain tensor here, so that optimisers and checkpoints know nothing of this; the two are attributes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.ops.narrow_tensor import NarrowTensor
from autopar.ir.ops.op_recipes import scaling_of
from autopar.ir.ops.quantise import quantised
from autopar.ir.ops.scalings import SCALINGS
from autopar.ir.placed.zero_units import axes_of_maxima
from autopar.ir.primitives.read_parameter import local_of, read_parameter
from autopar.ir.program import StageProgram
from autopar.runtime.torch_private import extend_gather, norms_of_all

_SCALING = SCALINGS["fp8-tensor"]


@dataclass(slots=True)
class NarrowGathers:
    """Of the parameters of one stage.

    find: gives a parameter that is sharded, by name. dtype: that they are computed in, None for their own. group: the
    ranks that hold pieces of any of them.
    """

    names: Sequence[str]
    find: Callable[[str], Tensor]
    dtype: torch.dtype | None
    group: dist.ProcessGroup | None
    largest: Tensor | None = None
    _extensions: list[_Extension] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._extensions = [_Extension(self, number) for number in range(len(self.names))]

    @torch.no_grad()
    def agree(self) -> None:
        """Take the largest magnitude of each parameter over all ranks. Before every call that may gather any, by all
        ranks of the stage together."""
        pieces = [local_of(self.find(name)) for name in self.names]
        for piece, extension in zip(pieces, self._extensions, strict=True):
            # A parameter may have been replaced since the last call.
            extend_gather(piece, extension.before, extension.after)
        here = [number for number, piece in enumerate(pieces) if piece.numel()]
        norms = norms_of_all([pieces[number] for number in here], inf) if here else ()
        of_piece = dict(zip(here, norms, strict=True))
        largest = torch.stack([of_piece.get(number, pieces[0].new_zeros(())) for number in range(len(pieces))])
        # Rounding keeps the order of numbers, so that the largest of what is rounded is the largest, rounded.
        largest = (largest if self.dtype is None else largest.to(self.dtype)).float()
        if self.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        self.largest = largest


class _Extension:
    """What FSDP calls for one parameter."""

    def __init__(self, gathers: NarrowGathers, number: int) -> None:
        self._gathers, self._number = gathers, number

    def __deepcopy__(self, memo: dict[int, Any]) -> _Extension:
        return self  # a copy of the tensor is of no stage

    @property
    def _largest(self) -> Tensor:
        assert self._gathers.largest is not None, "ranks agree before they gather"
        return self._gathers.largest[self._number]

    def before(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """The bytes that this rank gives: as many as any, filled up with zeros."""
        gathers = self._gathers
        piece = local_of(gathers.find(gathers.names[self._number]))
        piece = piece if gathers.dtype is None else piece.to(gathers.dtype)
        values = quantised(piece, self._largest, _SCALING.value, _SCALING, weight=True).values.view(torch.uint8)
        missing = -(-outer_size[0] // mesh.size()) - values.shape[0]
        return (F.pad(values, (0, 0, 0, missing)) if missing else values,), None

    def after(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What blocks read, of the bytes of all ranks. out: what they read the last time, of the same memory."""
        if out is None:
            return NarrowTensor(outputs[0].view(_SCALING.value.dtype), self._largest, dtype), ()
        known = local_of(out)
        assert isinstance(known, NarrowTensor), "of an earlier gather"
        known.largest = self._largest
        return None


def axes_of_stage(program: StageProgram) -> tuple[int, ...]:
    """Mesh axes over which the ranks of a stage agree on largest magnitudes."""
    cuts = [(layout.layout, layout.zero_axes) for name in narrow_names(program) if (layout := program.parameters[name])]
    return axes_of_maxima(cuts, program.shard_axes, program.mesh)


def narrow_names(program: StageProgram) -> tuple[str, ...]:
    """Original names of the parameters that a stage gathers in 8 bits, in order."""
    return tuple(sorted(unit.parameters[own].name for unit in program.zero_units for own in unit.narrow))


def read_otherwise(program: StageProgram, names: Container[str]) -> str | None:
    """One of ``names`` that a program reads in another way than as the weight of a product by tensor; None if none."""
    for block in (*program.totals, *program.blocks):
        inputs = iter(block.inputs)
        for node in block.graph.nodes:
            name = next(inputs) if node.op == "placeholder" else str(node.target) if node.op == "get_attr" else ""
            if name not in names:
                continue
            for read in node.users:
                for user in read.users if read.target is read_parameter else (read,):
                    scaling = scaling_of(user)
                    if scaling is None or not scaling.has_one_scale or user.args[1] is not read:
                        return name
    return None
