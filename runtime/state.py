"""Whole tensors out of the ranks' parts, and back; the gradient norm over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.errors import InvalidInput
from autopar.ir.graph import Parameter
from autopar.ir.placed.storage import zero_dim
from autopar.ir.placement import Shard, local_shape
from autopar.ir.primitives.group_communication import group_all_gather
from autopar.ir.primitives.read_parameter import local_of
from autopar.ir.program import ParameterLayout
from autopar.runtime.mesh import JobMesh
from autopar.runtime.parameters import local_shard
from autopar.runtime.torch_private import norms_of_all, scale_all


@dataclass(frozen=True, slots=True)
class Stored:
    """How this rank stores one parameter.

    summed_axes: mesh axes over which FSDP sums its gradient. zero_axes: those of them over which FSDP cuts it further,
    along ``zero_dim``.
    """

    layout: ParameterLayout
    summed_axes: tuple[int, ...] = ()
    zero_axes: tuple[int, ...] = ()
    zero_dim: int = 0

    @classmethod
    def of(cls, layout: ParameterLayout, shard_axes: Sequence[int], mesh: JobMesh) -> Stored:
        """Of a parameter that FSDP shards over those of ``shard_axes`` that are its own."""
        axes = tuple(axis for axis in layout.zero_axes if axis in shard_axes)
        shape = local_shape(layout.parameter.shape, layout.layout, mesh.stage_mesh)
        return cls(layout, summed_axes=layout.zero_axes, zero_axes=axes, zero_dim=zero_dim(shape, mesh.size(axes)))

    def local_part(self, full: torch.Tensor, mesh: JobMesh) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        piece = local_shard(full, self.layout.layout, mesh)
        flat = mesh.flat(self.zero_axes)
        if flat is not None:
            # FSDP cuts as torch.chunk does; ranks beyond the last piece hold nothing.
            pieces = torch.chunk(piece, flat.size(), dim=self.zero_dim)
            rank = flat.get_local_rank()
            piece = pieces[rank] if rank < len(pieces) else piece[:0]
        return piece

    def whole(self, part: torch.Tensor, mesh: JobMesh) -> torch.Tensor:
        """The whole tensor out of this rank's part and the others'. All ranks of the stage call together."""
        cuts = [
            (placement.dim, axis)
            for axis, placement in enumerate(self.layout.layout)
            if isinstance(placement, Shard) and mesh.stage_mesh.sizes[axis] > 1
        ]
        flat = mesh.flat(self.zero_axes)
        if flat is not None and self.zero_dim:
            part = group_all_gather(part, self.zero_dim, flat.get_group().group_name)
        elif flat is not None:
            rows = self.layout.parameter.shape[0] // mesh.size(axis for dim, axis in cuts if dim == 0)
            padded = part.new_zeros(-(-rows // flat.size()), *part.shape[1:])
            padded[: part.shape[0]] = part
            part = group_all_gather(padded, 0, flat.get_group().group_name)[:rows]
        for dim, axis in reversed(cuts):
            group = mesh.group([axis])
            assert group is not None, "an axis of several ranks"
            part = group_all_gather(part, dim, group.group_name)
        return part

    def sums(self, mesh: JobMesh) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The groups over which its gradient is summed by other means than FSDP: ranks of a stage, and stages."""
        axes = tuple(axis for axis in self.layout.partial_axes if axis not in self.summed_axes)
        stages = self.layout.stages
        return mesh.group(axes), mesh.group_over_stages(stages) if len(stages) > 1 else None

    def counted_here(self, mesh: JobMesh) -> bool:
        """Whether this rank is the one that counts its part: each element is counted once in the job."""
        copies = [
            axis
            for axis, placement in enumerate(self.layout.layout)
            if placement.is_replicate() and axis not in self.zero_axes
        ]
        return mesh.holds(self.layout.stages[0]) and mesh.first_on(copies)


def gather_full(
    parameters: Iterable[Parameter],
    stages: Mapping[str, int],
    local: Callable[[str], torch.Tensor | None],
    stored: Mapping[str, Stored],
    mesh: JobMesh,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU of every rank, by first name.

    stages: the stage that sends each. local: this rank's part (None counts as zeros). stored: how it is cut, whole if
    it is not there. All ranks call together.
    """
    full: dict[str, torch.Tensor] = {}
    for parameter in parameters:
        stage = stages[parameter.name]
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        if mesh.holds(stage):
            part = local(parameter.name)
            if part is not None:
                part = part.detach().to(device)
                part = local_of(part)
                how = stored.get(parameter.name)
                whole = part if how is None else how.whole(part, mesh)
        if mesh.num_pipeline_ranks > 1:
            whole = whole.contiguous()
            dist.broadcast(whole, src=mesh.rank_in_stage(stage), group=mesh.pipeline_group())
        full[parameter.name] = whole.cpu().clone() if whole.device.type == "cpu" else whole.cpu()
    return full


def join_pieces(parameters: Iterable[Parameter], full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's tensors, by first name, out of whole tensors of its captured parameters: pieces put together."""
    joined: dict[str, torch.Tensor] = {}
    for parameter in parameters:
        value, name = full[parameter.name], parameter.whole_names[0]
        if parameter.part is None:
            joined[name] = value
        else:
            if name not in joined:
                joined[name] = value.new_zeros(parameter.part.shape)
            parameter.part.of(joined[name]).copy_(value)
    return joined


def piece_of(whole: torch.Tensor, parameter: Parameter, name: str) -> torch.Tensor:
    """The piece of tensor ``name`` of a full state dict that ``parameter`` holds."""
    assert parameter.part is not None, "a piece"
    if tuple(whole.shape) != parameter.part.shape:
        raise InvalidInput(
            f"state dict: {name} has shape {tuple(whole.shape)}, expected {parameter.part.shape}.\n"
            "  try: the state dict of the model that the plan was made for"
        )
    return parameter.of(whole)


def load_full(parameter: torch.Tensor, value: torch.Tensor, name: str, stored: Stored | None, mesh: JobMesh) -> None:
    """Copy a whole tensor, or one stored as the parameter is, into a parameter or buffer. No communication."""
    part, target = local_of(value), local_of(parameter)
    to_cut = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
    if to_cut and stored is not None and value.shape == parameter.shape:
        part = stored.local_part(value, mesh)
    if part.shape != target.shape:
        raise InvalidInput(
            f"state dict: {name} has shape {tuple(value.shape)}, expected {tuple(parameter.shape)}.\n"
            "  try: the state dict of the model that the plan was made for"
        )
    with torch.no_grad():
        target.copy_(part)


class Portions(Protocol):
    """Divides parameters into portions whose gradients are in memory together."""

    def portions(
        self, parameters: Sequence[tuple[nn.Parameter, Stored]], *, changed: bool
    ) -> Iterable[Sequence[tuple[nn.Parameter, Stored]]]:
        """changed: whether they are changed before the next portion is asked for."""


@torch.no_grad()
def gradient_norm(
    parameters: Sequence[tuple[nn.Parameter, Stored]], mesh: JobMesh, disk: Portions | None = None
) -> torch.Tensor:
    """The 2-norm of the gradients over all parameters of all stages. disk: where some of them are.

    All ranks call together; one scalar is communicated.
    """
    device = torch.device(mesh.device_mesh.device_type)
    norms: list[torch.Tensor] = []
    for portion in [parameters] if disk is None else disk.portions(parameters, changed=False):
        counted = [local_of(p.grad) for p, stored in portion if p.grad is not None and stored.counted_here(mesh)]
        norms += [norm.to(device, torch.float32) for norm in norms_of_all(counted)] if counted else []
    squares = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float32, device=device)
    dist.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[tuple[nn.Parameter, Stored]], max_norm: float, mesh: JobMesh, disk: Portions | None = None
) -> torch.Tensor:
    """Scale gradients in place so that their 2-norm over all parameters of all stages is at most ``max_norm``.

    Returns the norm before. disk: where some of them are. All ranks call together; one scalar is communicated.
    """
    norm = gradient_norm(parameters, mesh, disk)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if disk is not None and float(scale) == 1.0:
        return norm
    for portion in [parameters] if disk is None else disk.portions(parameters, changed=True):
        gradients = [local_of(p.grad) for p, _ in portion if p.grad is not None]
        # Offloaded gradients are in host memory.
        for place in {gradient.device for gradient in gradients}:
            scale_all([gradient for gradient in gradients if gradient.device == place], scale.to(place))
    return norm
