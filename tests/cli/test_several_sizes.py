"""``search`` for several batches and lengths: one capture, the plans of single searches, and one over a mixture."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autopar import planning_sizes, sized_captures, sized_workers
from autopar.cli.main import main
from autopar.cli.sizes import shares_of, sizes_of
from autopar.cost_model.catalogue import make_cluster
from autopar.helper import Helper
from autopar.ir.errors import AutoparError, InvalidInput
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file
from autopar.planning import find_plan
from autopar.planning_sizes import _order, find_plans
from autopar.search.api import predict_plan
from autopar.search.outer.best_first import TOLERANCE
from autopar.search.problem.constraints import Constraints
from autopar.sized_searches import SizedSearches

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")


def autopar(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_sizes_are_lists_and_doublings() -> None:
    assert sizes_of(None, "--seq") == ()
    assert sizes_of("2048,8192", "--seq") == (2048, 8192)
    assert sizes_of("256:2048", "--seq") == (256, 512, 1024, 2048)
    assert sizes_of("1,8:16", "--seq") == (1, 8, 16)
    assert shares_of("0.8,2") == (0.8, 2.0)


@pytest.mark.parametrize("text", ["", "x", "256:300", "8:4", "0", "8,8", "1:2:4", "-4"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--seq"):
        sizes_of(text, "--seq")


@pytest.mark.parametrize("text", ["", "a", "-1,2", "0,0", "nan", "inf"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--shares"):
        shares_of(text)


def test_sizes_begin_with_those_around_them() -> None:
    order = _order((2, 4), (1, 2, 3, 5))
    assert list(order) == [(2, 5), (4, 1), (2, 3), (4, 3), (2, 2), (4, 2)], "longest first, then halves"
    ends = (2, 1), (4, 5)
    assert order[2, 5] == order[4, 1] == ends
    assert order[2, 3] == ((2, 1), (2, 5))
    assert order[4, 2] == ((2, 2), (4, 1), (4, 3))
    assert _order((2,), (7,)) == {}
    assert _order((2, 4, 8), (7,)) == {(4, 7): ((2, 7), (8, 7))}


@pytest.mark.slow
def test_plans_are_as_good_as_those_of_single_searches() -> None:
    source, cluster = load_model_file(GPT), make_cluster("h100-sxm", 8, 8)
    limits = Constraints(precision="bf16")
    found = find_plans(
        source.meta_model(), cluster, source.meta_inputs, (16, 64), (256, 4096), shares=(3, 1), constraints=limits
    )
    assert found.num_captures == 2  # with symbols, and at the first size, to compare
    assert [(own.batch, own.length) for own in found.found] == [(16, 256), (16, 4096), (64, 256), (64, 4096)]
    alone_at = {}
    for own in found.found:
        alone = find_plan(
            source.meta_model(), cluster, source.meta_inputs(own.batch, own.length), constraints=limits
        ).result
        alone_at[own.batch, own.length] = alone.workload.captured
        assert own.plan is not None
        assert own.plan.prediction is not None
        assert own.plan.batch.global_size == own.batch
        step_time_s = own.plan.prediction.step_time_s
        # Another plan may be as good.
        assert step_time_s <= alone.predicted.step_time_s * (1 + 2 * TOLERANCE)
        # Predicted for a part of the batch that all share, as for that batch alone.
        expected = predict_plan(alone.workload.captured, cluster, own.plan)
        assert expected.step_time_s == pytest.approx(step_time_s, rel=1e-9)
        assert int(expected.peak_bytes) == own.plan.prediction.peak_memory_bytes
        assert alone.plan.prediction is not None
        tokens = own.plan.prediction.tokens_per_s_per_gpu * step_time_s
        assert tokens == pytest.approx(alone.plan.prediction.tokens_per_s_per_gpu * alone.predicted.step_time_s)
    for batch, mixed in zip((16, 64), found.mixed, strict=True):
        short, long = (own.plan for own in found.found if own.batch == batch)
        assert short is not None
        assert long is not None
        assert short.prediction is not None
        assert mixed.step_time_s == pytest.approx((3 * mixed.at[256] + mixed.at[4096]) / 4)
        assert mixed.at[256] >= short.prediction.step_time_s * (1 - 1e-9)
        for plan in (short, long):
            times = [predict_plan(alone_at[batch, n], cluster, plan).step_time_s for n in (256, 4096)]
            assert mixed.step_time_s <= (3 * times[0] + times[1]) / 4 * (1 + 1e-9)


@pytest.mark.parametrize("spare", [0, 1, "killed"])
def test_forks_find_the_same(monkeypatch: pytest.MonkeyPatch, spare: int | str) -> None:
    """Where there are cores for it, a fork makes the capture that is compared, and lengths are shared out; of a fork
    that ends this process does the work."""
    forks: list[Helper] = []

    class Killed(Helper):
        def __init__(self, work: Any) -> None:
            super().__init__(work)
            forks.append(self)
            os.kill(self.pid, signal.SIGKILL)

    for module in (planning_sizes, sized_captures):
        monkeypatch.setattr(module, "spare_cores", lambda: 0 if spare == 0 else 1)
    if spare == "killed":
        for module in (sized_workers, sized_captures):
            monkeypatch.setattr(module, "Helper", Killed)
    source, cluster = load_model_file(GPT), make_cluster("h100-sxm", 8, 8)
    found = find_plans(
        source.meta_model(), cluster, source.meta_inputs, (16,), (256, 1024), pin_degrees=True, shares=(3, 1)
    )
    assert len(forks) == 2 * (spare == "killed")
    assert [(own.batch, own.length) for own in found.found] == [(16, 256), (16, 1024)]
    for own in found.found:
        inputs = source.meta_inputs(own.batch, own.length)
        alone = find_plan(source.meta_model(), cluster, inputs, pin_degrees=True).plan
        assert own.plan is not None
        assert own.plan.mesh == alone.mesh
        assert own.plan.prediction == alone.prediction
    assert found.num_captures == 2


def test_an_error_of_a_search_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever meets it: this process or a fork, whose job is done here again."""

    def failing(searches: SizedSearches, size: Any, known: Any) -> Any:
        raise AutoparError(f"no plan for {size}")

    monkeypatch.setattr(SizedSearches, "nearby", failing)
    monkeypatch.setattr(planning_sizes, "spare_cores", lambda: 1)
    source, cluster = load_model_file(GPT), make_cluster("h100-sxm", 8, 8)
    running = threading.active_count()
    with pytest.raises(AutoparError, match="no plan for"):
        find_plans(source.meta_model(), cluster, source.meta_inputs, (16, 32), (256, 1024), pin_degrees=True)
    deadline = time.monotonic() + 10
    while threading.active_count() > running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == running


def test_batches_that_do_not_divide() -> None:
    """6 rows on 4 data-parallel ranks have the plan for 8 that a search for them alone finds."""
    source, cluster, limits = load_model_file(GPT), make_cluster("h100-sxm", 4, 4), Constraints(dp=4)
    found = find_plans(
        source.meta_model(), cluster, source.meta_inputs, (6, 12), (128, 256), constraints=limits, pin_degrees=True
    )
    assert [own.batch for own in found.found] == [6, 6, 12, 12]
    for own in found.found:
        inputs = source.meta_inputs(own.batch, own.length)
        alone = find_plan(source.meta_model(), cluster, inputs, constraints=limits, pin_degrees=True).plan
        assert own.plan is not None
        assert own.plan.batch == alone.batch
        assert own.plan.planned_rows == {6: 8, 12: 12}[own.batch]
        assert own.plan.prediction == alone.prediction


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--gpus", "8", "--global-batch", "16", "--seq", "256,1024", "--shares", "0.9,0.1"]
    assert autopar(monkeypatch, "search", GPT, *sizes, "-o", str(tmp_path / "plans")) == 0
    out = capsys.readouterr().out
    assert "batch 16, over the shares: the one for" in out
    names = ["batch16-mixture.yaml", "batch16-seq1024.yaml", "batch16-seq256.yaml"]
    assert sorted(path.name for path in (tmp_path / "plans").iterdir()) == names
    plan = Plan.load(tmp_path / "plans" / "batch16-seq1024.yaml")
    assert (plan.batch.global_size, plan.model.seq) == (16, 1024)
    assert autopar(monkeypatch, "search", GPT, *sizes, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["seq"] for one in data["plans"]] == [256, 1024]
    assert data["mixtures"][0]["step_time_s_by_seq"].keys() == {"256", "1024"}
    assert autopar(monkeypatch, "search", GPT, *sizes, "--report", str(tmp_path / "plan.html")) == 2
    assert "--report is about one plan" in capsys.readouterr().err


def test_a_share_for_every_length(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert autopar(monkeypatch, "search", GPT, "--gpus", "8", "--seq", "256,1024", "--shares", "1") == 2
    assert "--shares has 1 share for 2 lengths" in capsys.readouterr().err
