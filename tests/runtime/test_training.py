"""Training steps on several ranks equal those of one process: hand-made programs, every ZeRO level and schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.engine import Engine
from autopar.runtime.module import ParallelModule
from tests.harness import run_ranks
from tests.runtime.handmade import batch, captured_tied, data_parallel_programs, model, plan_for

STEPS = 3


def _reference(clip: float | None = None) -> dict[str, Any]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses, gradients, norm = [], {}, None
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = net(**batch(number))["loss"]
        loss.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
        optimizer.step()
        losses.append(loss.detach())
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return {"losses": losses, "gradients": gradients, "state": state, "norm": norm}


def _train(settings: dict[str, Any], remat: str = "none", clip: float | None = None, to_none: bool = True) -> Any:
    captured = captured_tied()
    plan = plan_for(**settings)
    programs = data_parallel_programs(captured, plan, remat=remat)
    pm = ParallelModule(Engine(model(), captured, plan, programs))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    losses, gradients, norm = [], {}, None
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        losses.append(pm.step(**pm.shard_batch(batch(number))))
        if clip is not None:
            norm = pm.clip_grad_norm_(clip)
        if number == 0:
            gradients = pm.full_gradients()
        optimizer.step()
    names = [name for name, _ in pm.named_parameters()]
    return {"losses": losses, "gradients": gradients, "state": pm.full_state_dict(), "norm": norm, "names": names}


def _check(results: list[Any], expected: dict[str, Any], chunks: int = 1) -> None:
    for result in results:
        torch.testing.assert_close(result["losses"], expected["losses"])
        assert list(result["state"]) == list(expected["state"])
        torch.testing.assert_close(result["gradients"], expected["gradients"], rtol=1e-4, atol=1e-7)
        expected["state"]["steps"].fill_(STEPS * chunks)
        torch.testing.assert_close(result["state"], expected["state"], rtol=1e-5, atol=1e-7)
        if expected["norm"] is not None:
            torch.testing.assert_close(result["norm"], expected["norm"])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_data_parallel_with_zero(zero: int, chunks: int) -> None:
    settings = {"mesh": {"dp": 2}, "zero": zero, "chunks": chunks}
    _check(run_ranks(_train, 2, settings), _reference(), chunks)


def test_gradients_zeroed_in_place() -> None:
    _check(run_ranks(_train, 2, {"mesh": {"dp": 2}, "chunks": 2}, to_none=False), _reference(), 2)


@pytest.mark.parametrize("zero", [0, 3])
def test_two_data_axes(zero: int) -> None:
    settings = {"mesh": {"outer": 2, "inner": 2}, "zero": zero}
    _check(run_ranks(_train, 4, settings, clip=0.05), _reference(clip=0.05))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_with_tied_weights(schedule: str) -> None:
    results = run_ranks(_train, 2, {"mesh": {}, "stages": 2, "chunks": 4, "schedule": schedule}, clip=0.05)
    _check(results, _reference(clip=0.05), 4)
    assert results[0]["names"][0] == results[1]["names"][0] == "embed.weight"
    assert "layers.0.up.weight" not in results[1]["names"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_pipeline_with_data_parallelism(zero: int) -> None:
    settings = {"mesh": {"dp": 2}, "stages": 2, "chunks": 4, "zero": zero}
    _check(run_ranks(_train, 4, settings, clip=0.05), _reference(clip=0.05), 4)


def test_four_stages_with_weights_tied_over_the_outer_ones() -> None:
    _check(run_ranks(_train, 4, {"mesh": {}, "stages": 4, "chunks": 4}), _reference(), 4)


@pytest.mark.parametrize("remat", ["full", "selective"])
@pytest.mark.parametrize("zero", [0, 3])
def test_rematerialization(remat: str, zero: int) -> None:
    _check(run_ranks(_train, 2, {"mesh": {"dp": 2}, "zero": zero}, remat=remat), _reference())


def _forward(zero: int) -> Any:
    captured = captured_tied()
    plan = plan_for({"dp": 2}, zero=zero)
    pm = ParallelModule(
        Engine(
            model(),
            captured,
            plan,
            data_parallel_programs(captured, plan),
            forward_program=lambda: data_parallel_programs(captured, plan, outputs="model")[0],
        )
    )
    found = []
    for number in range(2):
        rows = pm.shard_batch(batch(number))
        output = pm(**rows)
        # The user's own mean over this rank's rows, accumulated over two passes.
        torch.nn.functional.cross_entropy(output["logits"], rows["labels"]).backward()
        found.append(output["loss"].detach())
    return found, pm.full_gradients(), output["logits"]


@pytest.mark.parametrize("zero", [0, 3])
def test_plain_forward_gives_averaged_gradients(zero: int) -> None:
    net = model()
    expected = []
    for number in range(2):
        output = net(**batch(number))
        output["loss"].backward()
        expected.append(output["loss"].detach())
    results = run_ranks(_forward, 2, zero)
    for losses, gradients, _ in results:
        torch.testing.assert_close(losses, expected)
        want = {name: p.grad for name, p in net.named_parameters()}
        torch.testing.assert_close(gradients, want, rtol=1e-4, atol=1e-7)
    joined = torch.cat([logits for _, _, logits in results])
    torch.testing.assert_close(joined, output["logits"].detach())


def _load(zero: int) -> Any:
    captured = captured_tied()
    plan = plan_for({"dp": 2}, stages=2, chunks=2, zero=zero)
    pm = ParallelModule(Engine(model(1), captured, plan, data_parallel_programs(captured, plan)))
    pm.load_state_dict(model(0).state_dict())
    first = pm.full_state_dict()
    pm.load_state_dict(pm.state_dict())
    assert dist.get_world_size() == 4
    return first, pm.full_state_dict()


@pytest.mark.parametrize("zero", [0, 3])
def test_state_dicts_go_in_and_out(zero: int) -> None:
    for first, second in run_ranks(_load, 4, zero):
        torch.testing.assert_close(first, dict(model(0).state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(second, first, rtol=0, atol=0)
