"""Training steps on several ranks equal those of one process: hand-made programs, every ZeRO stage and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
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


def _check(results: list[Any], expected: dict[str, Any]) -> None:
    for result in results:
        torch.testing.assert_close(result["losses"], expected["losses"])
        assert list(result["state"]) == list(expected["state"])
        torch.testing.assert_close(result["gradients"], expected["gradients"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(result["state"], expected["state"], rtol=1e-5, atol=1e-7)
        if expected["norm"] is not None:
            torch.testing.assert_close(result["norm"], expected["norm"])


TWO_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"dp2 zero{zero} x{chunks}": ({"mesh": {"dp": 2}, "zero": zero, "chunks": chunks}, {})
        for zero in range(4)
        for chunks in (1, 2)
    },
    "dp2 gradients zeroed in place": ({"mesh": {"dp": 2}, "chunks": 2}, {"to_none": False}),
    **{
        f"dp2 zero{zero} remat {remat}": ({"mesh": {"dp": 2}, "zero": zero}, {"remat": remat})
        for zero in (0, 3)
        for remat in ("full", "selective")
    },
    **{
        f"pp2 {schedule} v{stages // 2} x{chunks}": (
            {"mesh": {}, "stages": stages, "chunks": chunks, "schedule": schedule, "virtual_stages": stages // 2},
            {"clip": 0.05},
        )
        for schedule, stages, chunks in [
            ("naive", 2, 4),
            ("zb-h1", 2, 4),
            ("zb-h1", 4, 4),
            ("zb-2p", 2, 4),
            ("interleaved", 4, 4),
            ("zb-v", 4, 1),
            ("zb-v", 4, 4),
            ("dualpipe-v", 4, 4),
        ]
    },
    "pp2 1f1b": ({"mesh": {}, "stages": 2, "chunks": 4, "schedule": "1f1b"}, {"clip": 0.05}),
    "pp2 gpipe": ({"mesh": {}, "stages": 2, "chunks": 4, "schedule": "gpipe"}, {"clip": 0.05}),
}
THREE_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp3 zb-2p with an uneven stage": ({"mesh": {}, "stages": 3, "chunks": 8, "schedule": "zb-2p"}, {"clip": 0.05}),
}
FOUR_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"dp2 dp2 zero{zero}": ({"mesh": {"outer": 2, "inner": 2}, "zero": zero}, {"clip": 0.05}) for zero in (0, 3)},
    **{
        f"dp2 pp2 zero{zero}": ({"mesh": {"dp": 2}, "stages": 2, "chunks": 4, "zero": zero}, {"clip": 0.05})
        for zero in range(4)
    },
    **{
        f"hybrid zero{zero} x{chunks} shards {axis}": (
            {"mesh": {"outer": 2, "inner": 2}, "zero": zero, "chunks": chunks, "shard_axes": [axis]},
            {"clip": 0.05},
        )
        for zero, chunks, axis in ((1, 2, "inner"), (2, 2, "inner"), (3, 1, "inner"), (3, 2, "inner"), (3, 2, "outer"))
    },
    "hybrid zero3 x2 prefetches 2": (
        {"mesh": {"outer": 2, "inner": 2}, "zero": 3, "chunks": 2, "shard_axes": ["inner"], "prefetch": 2},
        {},
    ),
    **{
        f"dp2 pp2 {schedule} zero{zero}": (
            {
                "mesh": {"dp": 2},
                "stages": stages,
                "chunks": 4,
                "zero": zero,
                "schedule": schedule,
                "virtual_stages": stages // 2,
            },
            {"clip": 0.05},
        )
        for schedule, stages, levels in [
            ("zb-h1", 2, (0, 1, 2)),
            ("zb-2p", 2, (0, 2)),
            ("interleaved", 4, (0, 3)),
            ("zb-v", 4, (0, 1, 2)),
            ("dualpipe-v", 4, (2,)),
        ]
        for zero in levels
    },
    "a level for each block": (
        {"mesh": {"outer": 2, "inner": 2}, "zero": 3, "chunks": 2, "levels": [1, 3, 0, 2]},
        {"clip": 0.05},
    ),
    "kept from forward to backward": (
        {"mesh": {"outer": 2, "inner": 2}, "zero": 3, "chunks": 2, "reshard_after_forward": False},
        {},
    ),
    **{
        f"offload zero{zero} x{chunks}": (
            {"mesh": {"outer": 2, "inner": 2}, "zero": zero, "chunks": chunks, "offload": True},
            {"clip": 0.05},
        )
        for zero, chunks in ((1, 2), (3, 1), (3, 2))
    },
    **{
        f"pp4 {schedule} with fewer microbatches": (
            {"mesh": {}, "stages": 4, "chunks": 2, "schedule": schedule},
            {},
        )
        for schedule in ("1f1b", "zb-h1", "zb-2p")
    },
    "pp4 zb-2p with twice as many microbatches": (
        {"mesh": {}, "stages": 4, "chunks": 8, "schedule": "zb-2p"},
        {"clip": 0.05},
    ),
    "pp4 tied over the outer stages": ({"mesh": {}, "stages": 4, "chunks": 4}, {}),
}


def _train_each(cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    return {name: _train(settings, **options) for name, (settings, options) in cases.items()}


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Any]]]:
    """Results of every case by number of ranks, then rank. One job each: starting ranks takes longer than steps."""
    cases = {2: TWO_RANKS, 3: THREE_RANKS, 4: FOUR_RANKS}
    return {ranks: run_ranks(_train_each, ranks, some) for ranks, some in cases.items()}


@pytest.mark.parametrize("case", [*TWO_RANKS, *THREE_RANKS, *FOUR_RANKS])
def test_training(case: str, trained: dict[int, list[dict[str, Any]]]) -> None:
    ranks = 2 if case in TWO_RANKS else 3 if case in THREE_RANKS else 4
    _, options = (TWO_RANKS | THREE_RANKS | FOUR_RANKS)[case]
    results = [result[case] for result in trained[ranks]]
    _check(results, _reference(options.get("clip")))
    if case == "pp2 1f1b":
        assert results[0]["names"][0] == results[1]["names"][0] == "embed.weight"
        assert "layers.0.up.weight" not in results[1]["names"]


@dataclass
class _Plain:
    """Programs of plain forwards."""

    captured: CapturedModel
    plan: Plan

    def programs(self, results: Any, *_: object) -> Any:
        return self.captured, data_parallel_programs(self.captured, self.plan, outputs=results)

    def uneven_obstacle(self, *_: object) -> str | None:
        return None


def _forward_each() -> Any:
    return [_forward(zero, together) for zero in range(4) for together in (False, True)]


def _forward(zero: int, together: bool) -> Any:
    """Two passes. together: with one backward for both, else each with its own."""
    captured = captured_tied()
    plan = plan_for({"dp": 2}, zero=zero)
    pm = ParallelModule(
        Engine(
            model(),
            captured,
            plan,
            data_parallel_programs(captured, plan),
            more=_Plain(captured, plan),
        )
    )
    found, losses = [], []
    for number in range(2):
        rows = pm.shard_batch(batch(number))
        output = pm(**rows)
        # The user's own mean over this rank's rows, accumulated over two passes.
        losses.append(torch.nn.functional.cross_entropy(output["logits"], rows["labels"]))
        if not together:
            losses.pop().backward()
        found.append(output["loss"].detach())
    if together:
        torch.stack(losses).sum().backward()
    return found, pm.full_gradients(), output["logits"]


def test_plain_forward_gives_averaged_gradients() -> None:
    net = model()
    expected = []
    for number in range(2):
        output = net(**batch(number))
        output["loss"].backward()
        expected.append(output["loss"].detach())
    want = {name: p.grad for name, p in net.named_parameters()}
    for results in zip(*run_ranks(_forward_each, 2), strict=True):
        for losses, gradients, _ in results:
            torch.testing.assert_close(losses, expected)
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


def _load_each() -> Any:
    return [_load(zero) for zero in (0, 3)]


def test_state_dicts_go_in_and_out() -> None:
    for results in run_ranks(_load_each, 4):
        for first, second in results:
            torch.testing.assert_close(first, dict(model(0).state_dict()), rtol=0, atol=0)
            torch.testing.assert_close(second, first, rtol=0, atol=0)
