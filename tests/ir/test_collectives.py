"""Every redistribution of values and gradients, carried out by real processes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Layout, Partial, Placement, Replicate, Shard, dual, local_shape
from autopar.ir.primitives import collectives
from autopar.ir.primitives.collectives import COLLECTIVES, bind_groups, step_call
from autopar.ir.primitives.group_communication import unbound_groups
from autopar.ir.redistribution import Collective, Step, grad_of_use, redistribute
from tests.harness import run_ranks
from tests.ir.layouts import axis_groups, piece, run_local, whole_of

LINE, SQUARE = Mesh.of(tp=4), Mesh.of(dp=2, tp=2)
SHAPE = (4, 3, 8)
SOURCES: tuple[Placement, ...] = (Replicate(), Partial(), Shard(0), Shard(2))


def _needs() -> list[tuple[Placement, Placement]]:
    """Every pair (value, gradient) that a consumer can ask for on one axis."""
    uses = itertools.product(SOURCES, (False, True))
    return list(dict.fromkeys((value, grad_of_use(value, sharded_elsewhere=lost)) for value, lost in uses))


def _cases(mesh: Mesh) -> list[tuple[Layout, Layout, Layout]]:
    width = len(mesh)
    choices = itertools.product(itertools.product(SOURCES, repeat=width), itertools.product(_needs(), repeat=width))
    return [(source, tuple(n[0] for n in needs), tuple(n[1] for n in needs)) for source, needs in choices]


def _tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    value, grad = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64)
    return value, grad


def _redistribute_all(mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
    """This rank's value and source gradient for every case."""
    names, rank = axis_groups(mesh), dist.get_rank()
    x, g = _tensors()
    results = []
    for source, value, grad in _cases(mesh):

        def chain(local: Tensor, steps: tuple[Step, ...] = redistribute(source, value, grad)) -> Tensor:
            for step in steps:
                function, kwargs = step_call(step, mesh)
                local = function(local, **{**kwargs, "group": names[kwargs["group"]]})
            return local * 1

        leaf = piece(x, source, mesh, rank).requires_grad_()
        result = chain(leaf)
        result.backward(piece(g, grad, mesh, rank))  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        results.append((result.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), LINE, SQUARE], ids=str)
def test_every_redistribution_moves_value_and_gradient(mesh: Mesh) -> None:
    ranks = run_ranks(_redistribute_all, mesh.size, mesh)
    x, g = _tensors()
    for number, (source, value, grad) in enumerate(_cases(mesh)):
        case = f"{source} -> {value} with gradient {grad}"
        moved = whole_of([rank[number][0] for rank in ranks], value, mesh)
        torch.testing.assert_close(moved, x, msg=lambda text, case=case: f"value of {case}: {text}")
        layout = tuple(dual(placement) for placement in source)
        back = whole_of([rank[number][1] for rank in ranks], layout, mesh)
        torch.testing.assert_close(back, g, msg=lambda text, case=case: f"gradient of {case}: {text}")


def _other_dtypes() -> dict[torch.dtype, list[Tensor]]:
    group, rank = axis_groups(Mesh.of(tp=2))["tp"], dist.get_rank()
    results = {}
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        x = (torch.arange(8).reshape(2, 4) % 3 + rank).to(dtype)
        results[dtype] = [
            collectives.all_gather(x, dim=1, group=group),
            collectives.split(x, dim=1, group=group),
            collectives.all_to_all(x, gather_dim=1, shard_dim=0, group=group),
            collectives.all_reduce(x, group=group),
            collectives.reduce_scatter(x.t(), dim=0, group=group),
        ]
    return results


def test_integers_booleans_and_bfloat16() -> None:
    ranks = run_ranks(_other_dtypes, 2)
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        held = [(torch.arange(8).reshape(2, 4) % 3 + rank).to(dtype) for rank in range(2)]
        total = held[0] | held[1] if dtype == torch.bool else held[0] + held[1]
        for rank, (gathered, own, moved, reduced, scattered) in enumerate(result[dtype] for result in ranks):
            assert gathered.dtype is own.dtype is moved.dtype is reduced.dtype is scattered.dtype is dtype
            assert torch.equal(gathered, torch.cat(held, 1))
            assert torch.equal(own, held[rank].chunk(2, 1)[rank])
            assert torch.equal(moved, torch.cat([h[rank : rank + 1] for h in held], 1))
            assert torch.equal(reduced, total)
            assert torch.equal(scattered, total.t().chunk(2, 0)[rank])


def _ops_called() -> set[str]:
    group = axis_groups(Mesh.of(tp=2))["tp"]
    with torch.profiler.profile() as profile:
        collectives.all_gather(torch.ones(2, 4), dim=1, group=group)
    return {event.name for event in profile.events()}  # type: ignore[no-untyped-call]  # torch gives it no annotations


def test_gathers_on_cpus_avoid_works_of_long_names() -> None:
    (called, _) = run_ranks(_ops_called, 2)
    assert "_c10d_functional::all_to_all_single" in called
    assert "_c10d_functional::all_gather_into_tensor" not in called


def _mlp(x: Tensor, up: Tensor, down: Tensor, group: str) -> Tensor:
    """A feed-forward block, sequence-sharded outside, tensor-parallel inside."""
    h = collectives.all_gather(x, dim=1, group=group, backward="reduce_scatter")
    y = collectives.reduce_scatter(torch.relu(h @ up) @ down, dim=1, group=group)
    z = collectives.all_to_all(y, gather_dim=1, shard_dim=2, group=group)
    s = collectives.split(collectives.all_gather(z, dim=2, group=group), dim=0, group=group)
    return collectives.all_reduce(collectives.divide(s, group=group), group=group, backward="all_reduce")


def _compiled() -> list[tuple[Tensor, list[Tensor | None]]]:
    group = axis_groups(Mesh.of(tp=2))["tp"]
    operands = [torch.randn(2, 3, 4), torch.randn(4, 6), torch.randn(6, 4)]
    grad = torch.randn(1, 6, 4)
    compiled = torch.compile(lambda *args: _mlp(*args, group), backend="aot_eager", fullgraph=True)
    return [run_local(lambda *args: _mlp(*args, group), operands, grad), run_local(compiled, operands, grad)]


def test_compiles_in_one_graph() -> None:
    for eager, compiled in run_ranks(_compiled, 2):
        torch.testing.assert_close(compiled, eager)


def test_shapes_without_processes() -> None:
    with FakeTensorMode(), unbound_groups(SQUARE, {"dp": 1}):
        x = torch.empty(SHAPE, requires_grad=True)
        for source, value, grad in _cases(SQUARE):
            current = x.new_empty(local_shape(SHAPE, source, SQUARE), requires_grad=True)
            moved = current
            for step in redistribute(source, value, grad):
                function, kwargs = step_call(step, SQUARE)
                moved = function(moved, **kwargs)
            assert moved.shape == local_shape(SHAPE, value, SQUARE)
            moved.sum().backward()  # type: ignore[no-untyped-call]
            assert current.grad is not None and current.grad.shape == current.shape


def test_graphs_show_and_rebind_groups() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    step = Step(1, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, gather_dim=1)
    function, kwargs = step_call(step, SQUARE)
    assert function in COLLECTIVES
    graph.output(graph.call_function(function, (x,), kwargs))
    module = fx.GraphModule({}, graph)
    assert "all_gather(x, dim = 1, group = 'tp', backward = 'reduce_scatter')" in module.code
    bind_groups(graph, {"dp": "3", "tp": "5"})
    module.recompile()
    assert "group = '5'" in module.code
    with pytest.raises(KeyError, match="5"):
        bind_groups(graph, {"dp": "3", "tp": "5"})


@pytest.mark.parametrize("forward", list(Collective))
def test_every_forward_kind_has_a_call(forward: Collective) -> None:
    function, kwargs = step_call(Step(0, forward, Collective.NONE, 0, 1), LINE)
    assert function.__name__ == ("identity" if forward is Collective.NONE else forward.value)
    assert kwargs["group"] == "tp"
