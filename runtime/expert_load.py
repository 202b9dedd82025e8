"""How many tokens each expert got in a step, over the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.lowered.moe import moe
from autopar.ir.ops import composite
from autopar.ir.placement import Shard
from autopar.ir.program import StageProgram
from autopar.runtime.mesh import JobMesh


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A mixture of experts of one stage: its module path, its experts, and the mesh axes that divide its tokens."""

    name: str
    num_experts: int
    token_axes: frozenset[int]


def expert_layers(program: StageProgram) -> tuple[ExpertLayer, ...]:
    """The mixtures of experts of a stage, in the order in which they run."""
    found = []
    for block in program.blocks:
        for node in block.graph.nodes:
            if node.op == "call_function" and node.target in (composite.moe, moe):
                index, w_up = node.args[1], node.args[3]
                degree = 1
                for axis, placement in zip(program.mesh.axes, w_up.meta["layout"], strict=True):
                    degree *= axis.size if placement == Shard(0) else 1
                axes = frozenset(a for a, placement in enumerate(index.meta["layout"]) if isinstance(placement, Shard))
                found.append(ExpertLayer(node.meta["path"], w_up.meta["val"].shape[0] * degree, axes))
    return tuple(found)


def sum_loads(
    programs: Sequence[StageProgram], own: Mapping[int, Sequence[Tensor]], mesh: JobMesh, device: torch.device
) -> dict[str, Tensor]:
    """Layer -> (E,) tokens of the global batch that each expert got. All ranks call together.

    own: stage of this rank -> its counts, a tensor for each of its layers.
    """
    parts: list[Tensor] = []
    names: list[str] = []
    for stage, program in enumerate(programs):
        for number, layer in enumerate(expert_layers(program)):
            names.append(layer.name)
            copies = set(range(len(mesh.coordinates))) - layer.token_axes
            counted = own.get(stage) and mesh.first_on(copies)
            parts.append(
                own[stage][number] if counted else torch.zeros(layer.num_experts, dtype=torch.int64, device=device)
            )
    if not parts:
        return {}
    total = torch.cat(parts)
    dist.all_reduce(total)
    return dict(zip(names, total.cpu().split([len(part) for part in parts]), strict=True))
