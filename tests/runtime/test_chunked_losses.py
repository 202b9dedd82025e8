"""A loss in chunks of tokens: the numbers of one process, the collectives on record, the memory that is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import autopar
from autopar.ir.lowered import loss_chunks
from autopar.ir.lowered.chunked_loss import linear_cross_entropy
from autopar.ir.plan import Plan
from benchmarks.issued import compared
from benchmarks.memory import TRIALS, run
from tests.end_to_end.stacks import Attention, batch, stack, tensor_parallel_plan
from tests.harness import run_ranks
from tests.parity import relative

DEPTH = 2


@contextmanager
def chunks(limit: int, chunk: int) -> Iterator[None]:
    """Losses in chunks of ``chunk`` logits, where a rank has more than ``limit``."""
    before = loss_chunks.LIMIT, loss_chunks.CHUNK
    loss_chunks.LIMIT, loss_chunks.CHUNK = limit, chunk
    try:
        yield
    finally:
        loss_chunks.LIMIT, loss_chunks.CHUNK = before


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunks_of_any_size_are_the_whole(reduction: Any, smoothing: float) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 37, 16), (50, 16), (50,))
    )
    target = torch.randint(0, 50, (2, 37))
    target[0, :40:3] = -100
    found = []
    for limit, chunk in ((1 << 30, 0), (100, 1), (100, 500), (100, 50 * 37), (100, 10**9)):
        with chunks(limit, chunk):
            loss = linear_cross_entropy(x, weight, bias, target, label_smoothing=smoothing, reduction=reduction)
            found.append((loss, *torch.autograd.grad(3 * loss, (x, weight, bias))))
            with torch.no_grad():
                again = linear_cross_entropy(x, weight, bias, target, label_smoothing=smoothing, reduction=reduction)
            torch.testing.assert_close(again, loss.detach())
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_a_frozen_head_has_no_gradient() -> None:
    x, weight = torch.randn(20, 4, requires_grad=True), torch.randn(9, 4)
    target = torch.randint(0, 9, (20,))
    with chunks(1, 36):
        (got,) = torch.autograd.grad(linear_cross_entropy(x, weight, None, target), x)
    wanted = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ weight.T, target), x)[0]
    torch.testing.assert_close(got, wanted)


def _divided_classes(plan: Plan, level: str) -> Plan:
    """The plan with the head's classes on tp, its blocks at a level of rematerialisation."""
    head = plan.blocks[-1].model_copy(update={"ops": {"linear": {"tp": "n"}, "cross_entropy": {"tp": "c"}}})
    remat = {} if level == "none" else {level: DEPTH + 2}
    stages = [plan.stages[0].model_copy(update={"remat": remat})]
    return plan.model_copy(update={"blocks": [*plan.blocks[:-1], head], "stages": stages})


CASES: dict[str, Any] = {
    "classes-none": "none",
    "classes-full": "full",
    "classes-selective": "selective",
    "zero3": {"dp": 2, "zero": 3},
    "zero0-m2-full": {"dp": 2, "zero": 0, "num_microbatches": 2, "remat": "full"},
    "pp2": {"pp": 2, "num_microbatches": 2},
    "cp2": {"cp": 2},
}


def _trained(names: list[str], limit: int, chunk: int) -> dict[str, tuple[dict[str, float], list[str], bool]]:
    """Case -> errors, what differs from the records, whether the loss is in chunks."""
    found = {}
    with chunks(limit, chunk):
        for name in names:
            model, alone, asked = stack(Attention, DEPTH), stack(Attention, DEPTH), CASES[name]
            if isinstance(asked, str):
                asked = {"plan": _divided_classes(tensor_parallel_plan(model, 2, sequence=True), asked)}
            parallel = autopar.parallelize(model, 2, example_inputs=batch(), **asked)
            given, unrecorded = batch(1), list[str]()
            loss = alone(**given)
            loss.backward()
            parallel.step(**parallel.shard_batch(given))
            torch.optim.SGD(parallel.parameters(), 0.0).zero_grad()
            with compared(parallel, unrecorded):
                got = parallel.step(**parallel.shard_batch(given))
            wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
            errors = {
                "loss": abs(got.item() - loss.item()) / loss.item(),
                "gradient": relative(parallel.full_gradients(), wanted),
            }
            code = "".join(str(m.code) for m in parallel.engine.stage.modules() if hasattr(m, "code"))
            found[name] = errors, unrecorded, "linear_cross_entropy" in code
    return found


@pytest.mark.parametrize("names", [["classes-full"], pytest.param(list(CASES), marks=pytest.mark.slow)])
def test_training_is_that_of_one_process(names: list[str]) -> None:
    ranks = run_ranks(_trained, 2, names, 40, 48)
    for name in names:
        for found in ranks:
            errors, unrecorded, _ = found[name]
            assert max(errors.values()) < 1e-5, (name, errors)
            assert not unrecorded, (name, unrecorded)
        assert any(found[name][2] for found in ranks), f"{name}: the loss is not in chunks"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRIALS if name.startswith("long")])
def test_peak_memory_is_as_predicted(name: str) -> None:
    """One MiB of logits at once instead of eight, in a step that needs little else."""
    for row in run(name):
        assert abs(row.error(row.tracked)) < 0.07, (row.total, row.tracked)
        assert abs(row.error(row.allocated)) < 0.13, (row.total, row.allocated)
