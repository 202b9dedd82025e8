"""What each rank of a mesh holds of a tensor, and back: shared by tests of collectives and lowered ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Shard
from autopar.ir.primitives.group_communication import joint_groups
from autopar.runtime.torch_private import flattened


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Position of ``rank`` on every axis; the last axis varies fastest."""
    return list(itertools.product(*(range(size) for size in mesh.sizes)))[rank]


def axis_groups(mesh: Mesh) -> dict[str, str]:
    """Axis name, and the joint one of all axes -> name of this process's group along it. Call on every rank, with the
    process group up."""
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    names = {name: device_mesh.get_group(name).group_name for name in mesh.names}
    if len(mesh) > 1:
        (joint,) = joint_groups(mesh.names)
        names[joint] = flattened(device_mesh).get_group().group_name
    return names


def piece(whole: Tensor, layout: Layout, mesh: Mesh, rank: int, *, seed: int = 7) -> Tensor:
    """What ``rank`` holds of ``whole``. Partial axes hold random summands, the same on every rank that asks."""
    place = coordinates(mesh, rank)
    local = whole
    for number, (placement, axis) in enumerate(zip(layout, mesh.axes, strict=True)):
        if isinstance(placement, Shard):
            local = local.chunk(axis.size, placement.dim)[place[number]]
        elif placement.is_partial():
            generator = torch.Generator().manual_seed(seed + number)
            parts = torch.randn(axis.size, *local.shape, generator=generator, dtype=torch.float64).to(local.dtype)
            parts = torch.cat([parts[1:], (local - parts[1:].sum(0))[None]])
            local = parts[place[number]]
    return local.clone()


def whole_of(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The tensor that ranks hold ``pieces`` of; asserts that replicas agree."""
    held = list(pieces)
    for placement, axis in reversed(list(zip(layout, mesh.axes, strict=True))):
        rows = [held[i : i + axis.size] for i in range(0, len(held), axis.size)]
        held = []
        for row in rows:
            if isinstance(placement, Shard):
                held.append(torch.cat(list(row), placement.dim))
            elif placement.is_partial():
                held.append(torch.stack(list(row)).sum(0))
            else:
                for other in row[1:]:
                    torch.testing.assert_close(other, row[0], rtol=0, atol=0, equal_nan=True)
                held.append(row[0])
    return held[0]


def run_local(
    function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """One rank's result of ``function(*operands)`` and its operands' gradients."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    result = function(*leaves)
    if grad is not None:
        result.backward(grad)  # type: ignore[no-untyped-call]
    dist.barrier()
    return result.detach(), [x.grad for x in leaves]
