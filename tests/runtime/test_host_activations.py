"""Activations that wait in host memory: the same gradients in every bit, and less memory of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import PlanMismatch
from autopar.ir.plan import Plan
from autopar.runtime import host_activations
from autopar.runtime.host_activations import BlockOnHost, HostMemory, OnHost
from autopar.search.api import predict_plan
from tests.end_to_end.stacks import Attention, FeedForward, batch, stack, tensor_parallel_plan
from tests.harness import run_ranks
from tests.runtime.held import kept_by_a_step
from tests.runtime.kept_plans import on_host, plans_that_keep

DEPTH = 4


class Recorded(host_activations._Copies):
    """Copies that are made only when something waits for them, as a stream may."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []

    def send(self, source: Tensor, buffer: Tensor) -> Any:
        self.pending.append((buffer, source))
        return len(self.pending)

    def fetch(self, buffer: Tensor, target: Tensor, sent: Any) -> Any:
        target.fill_(99)
        self.wait(sent)
        self.pending.append((target, buffer))
        return len(self.pending)

    def wait(self, copy: Any) -> None:
        target, source = self.pending[copy - 1]
        target.copy_(source)


def forward(memory: HostMemory, values: list[Tensor]) -> list[OnHost]:
    """A forward in which each block puts one tensor there, which nothing else holds."""
    memory.begin_forward()
    found = []
    while values:
        block = BlockOnHost(memory)
        sent = block.put(values.pop(0))
        assert isinstance(sent, OnHost)
        block.end_forward()
        found.append(sent)
    return found


def blocks_of(memory: HostMemory) -> list[BlockOnHost]:
    """Of the last forward, the last one first."""
    found = []
    block = memory.latest
    while block is not None:
        found.append(block)
        block = block._next
    return found


def drawn(count: int) -> list[Tensor]:
    return [torch.full((3, 4), float(number)) for number in range(count)]


def test_two_blocks_have_something_on_the_device() -> None:
    memory = HostMemory(torch.device("cpu"))
    memory.copies = Recorded()
    tensors = forward(memory, drawn(4))
    blocks = blocks_of(memory)
    assert [own._here is not None for own in tensors] == [False, False, False, True]
    for number, block in enumerate(blocks):
        block.begin_backward()
        here = [own._here is not None for own in tensors]
        assert here == [3 - number - 1 <= at <= 3 - number for at in range(4)]
        value = tensors[3 - number].take()
        assert value.equal(torch.full((3, 4), float(3 - number)))
    assert all(own._here is None for own in tensors)
    # What had not left was not copied back.
    assert len(memory.copies.pending) == 4 + 3


def test_a_tensor_comes_back_as_it_lay() -> None:
    memory = HostMemory(torch.device("cpu"))
    whole = torch.randn(4, 6, 8)
    given = [
        whole.transpose(0, 2), whole[1:, ::2], whole[0, 0, 0], torch.ones(5, 1).expand(5, 3), torch.arange(7),
        torch.tensor([True, False]), torch.randn(3, dtype=torch.complex64), torch.randn(2, 2).to(torch.bfloat16),
    ]  # fmt: skip
    memory.begin_forward()
    block, last = BlockOnHost(memory), BlockOnHost(memory)
    sent = [block.put(value) for value in given]
    block.end_forward()
    last.end_forward()
    for value, own in zip(given, sent, strict=True):
        assert isinstance(own, OnHost)
        assert own._here is None
        back = own.take()
        assert (back.shape, back.stride(), back.dtype) == (value.shape, value.stride(), value.dtype)
        assert back.equal(value)
    assert block.put(torch.empty(0, 3)).shape == (0, 3)


def test_what_two_blocks_put_there_is_sent_once() -> None:
    memory, shared = HostMemory(torch.device("cpu")), torch.randn(8)
    memory.begin_forward()
    blocks = [BlockOnHost(memory) for _ in range(3)]
    sent = []
    for block in blocks:
        sent.append(block.put(shared))
        block.end_forward()
    assert len({id(own) for own in sent}) == 1
    assert memory.num_bytes == 32
    one = sent[0]
    assert isinstance(one, OnHost)
    for left in (True, True, False):
        assert one.take().equal(shared)
        assert (one._here is not None) is left


def test_buffers_are_used_again() -> None:
    memory = HostMemory(torch.device("cpu"))
    for rows in (40, 40, 36, 40):
        tensors = forward(memory, [torch.randn(rows) for _ in range(3)])
        assert memory.num_bytes == 3 * 160
        del tensors
        memory.begin_forward()
        memory.release()
    forward(memory, [torch.randn(80)])
    assert memory.num_bytes == 3 * 160 + 320


def plan_of(block: Any, ranks: int) -> Plan:
    plan = tensor_parallel_plan(stack(block, DEPTH), ranks, sequence=ranks > 1)
    if ranks == 1:  # no op is placed anywhere
        plan = plan.model_copy(update={"mesh": {}, "blocks": [b.model_copy(update={"ops": {}}) for b in plan.blocks]})
    return plan


def measured(block: Any, ranks: int) -> dict[str, Any]:
    """Of each plan: bytes kept on the device by a forward, predicted and measured, those in host memory likewise, and
    gradients."""
    inputs, plan = batch(), plan_of(block, ranks)
    cluster = make_cluster("cpu", ranks, ranks)
    whole = autopar.parallelize(stack(block, DEPTH), ranks, example_inputs=inputs, plan=plan)
    sets = plans_that_keep(plan, whole.engine.captured, cluster)
    every = {"everything": plan} | sets | {f"{name} on host": on_host(own) for name, own in sets.items()}
    found = {}
    for name, own in every.items():
        parallel = autopar.parallelize(stack(block, DEPTH), ranks, example_inputs=inputs, plan=own)
        predicted = predict_plan(parallel.engine.captured, cluster, own)
        parallel.step(**inputs)
        host = parallel.engine.stage.host.num_bytes
        # Buffers in host memory are there before and after.
        kept = kept_by_a_step(parallel, inputs)
        assert parallel.engine.stage.host.num_bytes == host
        found[name] = predicted.kept_bytes[0], kept, predicted.host_bytes[0], host, parallel.full_gradients()
    return found


@pytest.mark.parametrize(
    ("block", "ranks"),
    [
        pytest.param(FeedForward, 1, id="mlp-one"),
        pytest.param(Attention, 2, id="attention-tp2-sp", marks=pytest.mark.slow),
    ],
)
def test_gradients_and_memory(block: Any, ranks: int) -> None:
    for found in run_ranks(measured, ranks, block, ranks):
        assert len(found) > 3
        for name, (predicted, kept, on_the_host, host, gradients) in found.items():
            assert kept == pytest.approx(predicted, rel=0.03, abs=400), name
            assert host == pytest.approx(on_the_host, rel=0.03), name
            if name.endswith("on host"):
                assert kept < 0.8 * found[name.removesuffix(" on host")][1], name
                assert host > 0, name
            for parameter, gradient in gradients.items():
                assert gradient.equal(found["everything"][4][parameter]), (name, parameter)


PIPELINES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "zb-h1", "virtual_stages": 1},
    {"schedule": "zb-v"},
    {"schedule": "found"},
]


def gradients_of(constraints: dict[str, Any]) -> tuple[dict[str, Tensor], ...]:
    """With what blocks keep on the device, in host memory, and in host memory in a second step."""
    inputs = batch()
    plain = autopar.parallelize(
        stack(FeedForward, DEPTH), 2, example_inputs=inputs, pp=2, num_microbatches=4, remat=0.5, **constraints
    )
    moved = autopar.parallelize(stack(FeedForward, DEPTH), 2, example_inputs=inputs, plan=on_host(plain.plan))
    found = []
    for parallel in (plain, moved, moved):
        parallel.zero_grad()
        parallel.step(**inputs)
        found.append(parallel.full_gradients())
    assert moved.engine.stage.host.num_bytes
    return tuple(found)


@pytest.mark.parametrize("constraints", PIPELINES, ids=lambda own: own["schedule"])
def test_gradients_of_pipelines(constraints: dict[str, Any]) -> None:
    for plain, *moved in run_ranks(gradients_of, 2, constraints):
        for own in moved:
            for name, gradient in own.items():
                assert gradient.equal(plain[name]), name


def evaluated() -> None:
    plan = plan_of(FeedForward, 1)
    whole = autopar.parallelize(stack(FeedForward, DEPTH), 1, example_inputs=batch(), plan=plan)
    (*_, kept) = plans_that_keep(plan, whole.engine.captured, make_cluster("cpu", 1, 1)).values()
    parallel = autopar.parallelize(stack(FeedForward, DEPTH), 1, example_inputs=batch(), plan=on_host(kept))
    with torch.no_grad():
        assert parallel(**batch()).equal(whole(**batch()))
    assert not parallel.engine.stage.host.num_bytes
    parallel(**batch()).backward()
    whole(**batch()).backward()
    assert parallel.engine.stage.host.num_bytes
    expected = whole.full_gradients()
    assert all(gradient.equal(expected[name]) for name, gradient in parallel.full_gradients().items())
    with pytest.raises(PlanMismatch, match="wait in host memory") as error:
        autopar.parallelize(stack(FeedForward, DEPTH), 1, example_inputs=batch(), plan=on_host(kept), compile=True)
    assert "try: compile=False" in str(error.value)


def test_plain_forwards_and_the_compiler() -> None:
    run_ranks(evaluated, 1)
