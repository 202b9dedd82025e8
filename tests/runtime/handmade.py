"""Stage programs written by hand, for a small model whose graph has no sizes in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.ir.plan import Batch, BlockPlan, ClusterRef, ModelRef, Plan, StagePlan
from autopar.ir.primitives.collectives import all_reduce
from autopar.ir.primitives.read_parameter import read_parameter
from autopar.ir.program import BlockProgram, ParameterLayout, StageProgram, TensorSpec

BATCH = 16
WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Tied(nn.Module):
    """Embedding, two layers, and a head that is the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        self.steps.add_(1)
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def batch(seed: int, rows: int = BATCH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 16, (rows,), generator=generator)
    return {"tokens": tokens, "labels": torch.randint(0, 16, (rows,), generator=generator)}


def model(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


@cache
def captured_tied() -> CapturedModel:
    return capture(model(), batch(0))


def plan_for(
    mesh: dict[str, int],
    *,
    stages: int = 1,
    chunks: int = 1,
    levels: Sequence[int | None] = (None,) * 4,
    offload: bool = False,
    **rest: Any,
) -> Plan:
    ranges = [StagePlan(first=4 * i // stages, last=4 * (i + 1) // stages - 1, offload=offload) for i in range(stages)]
    return Plan(
        model=ModelRef(name="Tied", fingerprint="none"),
        cluster=ClusterRef(gpu="cpu", num_gpus=4, gpus_per_node=4),
        batch=Batch(global_size=BATCH, num_microbatches=chunks),
        mesh=mesh,
        inputs=list(mesh),
        blocks=[
            BlockPlan(name=name, zero=level)
            for name, level in zip(("embed", "layers.0", "layers.1", "head"), levels, strict=True)
        ],
        stages=ranges,
        **rest,
    )


def data_parallel_programs(
    captured: CapturedModel, plan: Plan, *, outputs: str = "loss", remat: str = "none"
) -> tuple[StageProgram, ...]:
    """Programs in which every mesh axis divides the batch."""
    mesh = plan.stage_mesh
    names = {n: p.name for n, p in captured.parameters.items()} | {n: b.name for n, b in captured.buffers.items()}
    calls = [n for n in captured.graph.nodes if n.op == "call_function"]
    loss, logits = captured.output_args()[0], captured.output_args()[1 + 1]
    updates = {b.name: b.updated_by for b in captured.buffers.values() if b.updated_by}
    block_of = {n: _block_number(n) for n in calls}
    rows = BATCH // mesh.size // plan.batch.num_microbatches
    users: dict[str, set[int]] = {}
    for node in calls:
        for operand in node.all_input_nodes:
            users.setdefault(operand.name, set()).add(block_of[node])

    def stage_of(block: int) -> int:
        return next(i for i, s in enumerate(plan.stages) if s.first <= block <= s.last)

    layouts = {
        p.name: ParameterLayout(
            parameter=p,
            layout=(Replicate(),) * len(mesh),
            partial_axes=tuple(range(len(mesh))),
            zero_axes=tuple(range(len(mesh))) if plan.zero else (),
            stages=tuple(sorted({stage_of(b) for b in users[n]})),
        )
        for n, p in captured.parameters.items()
    }
    programs = []
    for number, stage in enumerate(plan.stages):
        own = range(stage.first, stage.last + 1)
        shared = [n for n in names if len(users.get(n, set()) & set(own)) > 1]
        blocks = []
        for index in own:
            inside = [n for n in calls if block_of[n] == index]
            graph = fx.Graph()
            copied: dict[fx.Node, fx.Node] = {}
            inputs: list[str] = []
            outside = dict.fromkeys(o for n in inside for o in n.all_input_nodes if o not in inside)
            for node in outside:
                if node.name not in names or node.name in shared:
                    copied[node] = graph.placeholder(node.name)
                    inputs.append(names.get(node.name, node.name))
            for node in outside:
                if node not in copied:
                    copied[node] = graph.create_node("get_attr", names[node.name], name=node.name)
            for node in outside:
                if node.name in captured.parameters:
                    copied[node] = graph.call_function(read_parameter, (copied[node],))
            for node in inside:
                copied[node] = graph.node_copy(node, copied.__getitem__)
                if node is loss:
                    pieces = float(mesh.size * plan.batch.num_microbatches)
                    copied[node] = graph.call_function(torch.ops.aten.div.Scalar, (copied[node], pieces))
                    for axis in mesh.names if outputs == "model" else ():
                        copied[node] = graph.call_function(all_reduce, (copied[node],), {"group": axis})
            own_state = [n for n in outside if n.name not in shared]
            kept = {loss, logits} | {n for n in calls if n.name in updates.values()}
            results = [n for n in inside if n in kept or any(u not in inside for u in n.users if u in block_of)]
            graph.output(tuple(copied[n] for n in results))
            blocks.append(
                BlockProgram(
                    name=plan.blocks[index].name,
                    kind=index,
                    graph=graph,
                    inputs=tuple(inputs),
                    outputs=tuple(n.name for n in results),
                    parameters=tuple(names[n.name] for n in own_state if n.name in captured.parameters),
                    buffers=tuple(names[n.name] for n in own_state if n.name in captured.buffers),
                    remat=remat,  # type: ignore[arg-type]
                )
            )
        held = {p for b in blocks for p in b.parameters} | {names[n] for n in shared if n in captured.parameters}
        wanted = {name for b in blocks for name in b.inputs}
        last = number == plan.num_stages - 1

        def crossing(before: int) -> tuple[TensorSpec, ...]:
            if not 0 < before < plan.num_stages:
                return ()
            return tuple(
                TensorSpec(name=n.name, shape=(rows, *n.meta["val"].shape[1:]), dtype=n.meta["val"].dtype)
                for n in calls
                if stage_of(block_of[n]) < before
                and any(u in block_of and stage_of(block_of[u]) >= before for u in n.users)
            )

        forward = outputs == "model"
        programs.append(
            StageProgram(
                stage=number,
                num_stages=plan.num_stages,
                mesh=mesh,
                blocks=tuple(blocks),
                inputs={n: s.key for n, s in captured.inputs.items() if n in wanted},
                received=crossing(number),
                sent=crossing(number + 1),
                parameters={name: layout for name, layout in layouts.items() if name in held},
                buffers={b.name: b for b in captured.buffers.values() if any(b.name in x.buffers for x in blocks)},
                constants={n: v for n, v in captured.constants.items() if n in wanted},
                shared_parameters=tuple(names[n] for n in shared if n in captured.parameters),
                shared_buffers=tuple(names[n] for n in shared if n in captured.buffers),
                buffer_updates={k: v for k, v in updates.items() if any(v in b.outputs for b in blocks)},
                outputs=(loss.name, logits.name) if forward else ((loss.name,) if last else (None,)),
                output_layouts=((Replicate(),) * len(mesh), (Shard(0),) * len(mesh)) if forward else (None,),
                loss=loss.name if last and not forward else None,
                loss_partial_axes=tuple(range(len(mesh))) if last else (),
                num_microbatches=plan.batch.num_microbatches,
                shard_axes=tuple(map(mesh.index, mesh.names if plan.shard_axes is None else plan.shard_axes))
                if plan.zero
                else (),
                input_layouts={n: (Shard(0),) * len(mesh) for n in captured.inputs},
                output_microbatches=(Partial(), Shard(0)) if forward else (),
            )
        )
    return tuple(programs)


def _block_number(node: fx.Node) -> int:
    path = node.meta.get("path") or ""
    if path.startswith("layers.1"):
        return 2
    if path.startswith("layers.0"):
        return 1
    return 0 if path.startswith("embed") else 3
