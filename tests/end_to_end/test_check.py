"""A plan for a thousand GPUs is executed on fake tensors: what is wrong with it is found, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.checking.check import Checked, check_plan
from autopar.checking.matching import mismatch
from autopar.checking.ranks import RankTrace
from autopar.checking.recorder import Communication, Recorder
from autopar.cli.main import main
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InvalidInput
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram
from autopar.ir.torch_private import FakeTensorMode
from autopar.load_model import load_model_file
from autopar.model_file import ModelFile
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


@pytest.fixture(scope="module")
def source() -> ModelFile:
    # Builds of torch for GPUs start threads for a backward on fake tensors, as a capture may do one, and then refuse
    # every backward in a fork.
    with FakeTensorMode():
        torch.ones(3, requires_grad=True).sum().backward()
    return load_model_file(str(GPT))


def captured_of(source: ModelFile, batch: int, seq: int = 64) -> CapturedModel:
    return normalise(capture(source.meta_model(), source.meta_inputs(batch, seq)))


def plan_of(captured: CapturedModel, gpus: int, **degrees: object) -> Plan:
    constraints = Constraints(**degrees)  # type: ignore[arg-type]  # of many types, checked when made
    return estimate_captured(captured, make_cluster("cpu", gpus, min(gpus, 8)), constraints).plan


PLANS = {
    "zero3 tp2": (4, {"dp": 2, "tp": 2, "zero": 3}),
    "hsdp": (4, {"dp": 4, "zero": 3, "shard": 2}),
    "zero2": (4, {"dp": 4, "zero": 2, "num_microbatches": 2}),
    "pp2 dp2": (4, {"pp": 2, "dp": 2, "zero": 0, "num_microbatches": 4}),
    "pp2 tp2 zb-v": (4, {"pp": 2, "tp": 2, "schedule": "zb-v", "virtual_stages": 2, "num_microbatches": 4}),
    "pp4 zb-2p": (4, {"pp": 4, "schedule": "zb-2p", "num_microbatches": 16}),
    "pp2 interleaved": (2, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "num_microbatches": 4}),
    "cp2 tp2 remat": (4, {"cp": 2, "tp": 2, "remat": "full"}),
}


QUICK = ("zero3 tp2", "pp2 dp2", "cp2 tp2 remat")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_a_right_plan_has_no_problems(source: ModelFile, name: str) -> None:
    gpus, degrees = PLANS[name]
    captured = captured_of(source, 16)
    cluster = make_cluster("cpu", gpus, gpus)
    plan = plan_of(captured, gpus, **degrees)
    checked = check_plan(source.build, captured, plan, cluster, ranks=[gpus - 1])
    assert not checked.problems
    assert [own.trace.rank for own in checked.ranks] == sorted({*range(0, gpus, plan.stage_mesh.size), gpus - 1})
    for own in checked.ranks:
        assert own.trace.communications
        predicted = own.predicted.total - own.predicted.workspace
        assert predicted == pytest.approx(own.peak_bytes, rel=0.25)


@pytest.mark.slow
def test_what_rematerialisation_saves_is_counted_once(source: ModelFile) -> None:
    captured, cluster = captured_of(source, 64, 256), make_cluster("cpu", 2, 2)
    peaks = {}
    for remat in ("none", "selective"):
        plan = plan_of(captured, 2, tp=2, sequence_parallel=False, dp=1, remat=remat)
        (own,) = check_plan(source.build, captured, plan, cluster).ranks
        peaks[remat] = own.peak_bytes
        # Sums over ranks and their summands are there in both; the shapes of the latter take no memory.
        assert own.predicted.total - own.predicted.workspace == pytest.approx(own.peak_bytes, rel=0.1), remat
    assert peaks["selective"] < 0.9 * peaks["none"]


def check_large(
    source: ModelFile, *, tamper: Callable[[Sequence[StageProgram]], Sequence[StageProgram]] | None = None
) -> tuple[Checked, float]:
    """1,024 ranks, tensor and data parallel in two stages; rank 515 runs what ``tamper`` makes of its programs."""
    captured = captured_of(source, 1024)
    plan = plan_of(captured, 1024, pp=2, tp=4, dp=128, num_microbatches=4, zero=0)
    made = partition(place_captured(captured, plan))
    start = sum(os.times()[:4])  # of CPU time, with that of the processes that it starts
    checked = check_plan(
        source.build,
        captured,
        plan,
        make_cluster("cpu", 1024, 8),
        ranks=[515],
        programs=lambda rank: tamper(partition(place_captured(captured, plan))) if tamper and rank == 515 else made,
    )
    return checked, sum(os.times()[:4]) - start


def without_a_collective(programs: Sequence[StageProgram]) -> Sequence[StageProgram]:
    """The last stage without its first sum over tensor ranks."""
    for block in programs[-1].blocks:
        for node in block.graph.nodes:
            if node.op == "call_function" and "all_reduce" in str(node.target):
                node.replace_all_uses_with(node.args[0])
                block.graph.erase_node(node)
                return programs
    raise AssertionError("there is a collective in the last stage")


def test_memory_that_is_given_back_by_resizing_is_not_counted() -> None:
    with Recorder() as recorder:
        value = torch.empty(100)
        storage = value.untyped_storage()
        assert (recorder.memory.now, recorder.memory.peak) == (400, 400)
        storage.resize_(0)
        assert (recorder.memory.now, recorder.memory.peak) == (0, 400)
        storage.resize_(800)
        assert (recorder.memory.now, recorder.memory.peak) == (800, 800)
        del value, storage
        assert recorder.memory.now == 0


def test_a_missing_collective_among_1024_ranks_is_found(source: ModelFile) -> None:
    checked, seconds = check_large(source, tamper=without_a_collective)
    assert seconds < 60
    unproved, unrecorded, problem = checked.problems
    assert "rank 515 sends what the plan does not record: all_reduce" in unrecorded
    assert "recorded 27 times, issued 24" in unrecorded
    assert "communications do not fit together" in problem and "rank 515" in problem and "rank 512" in problem
    assert "1 of 1,024 ranks (rank 515 is the first) are not proved" in unproved and "Partial()" in unproved
    assert sorted(len(own.ranks) for own in checked.proved) == [1, 1023]


@pytest.mark.slow
def test_1024_ranks_agree(source: ModelFile) -> None:
    checked, _ = check_large(source)
    assert not checked.problems and [own.trace.rank for own in checked.ranks] == [0, 512, 515]


@pytest.mark.slow
def test_what_does_not_fit_is_found(source: ModelFile) -> None:
    captured = captured_of(source, 1024)
    plan = plan_of(captured, 1024, pp=2, tp=4, dp=128, num_microbatches=4, zero=0)
    fits = check_plan(source.build, captured, plan, make_cluster("cpu", 1024, 8))
    small = make_cluster("cpu", 1024, 8).with_memory(int(0.9 * max(own.peak_bytes for own in fits.ranks)))
    (problem,) = check_plan(source.build, captured, plan, small).problems
    assert "out of memory" in problem and "GiB" in problem and "try:" in problem


def test_ranks_that_wait_for_each_other() -> None:
    def trace(rank: int, *communications: Communication) -> RankTrace:
        return RankTrace(rank=rank, num_microbatches=1, communications=communications, persistent_bytes=0, peak_bytes=0)

    def sum_over(*ranks: int) -> Communication:
        return Communication("all_reduce", ranks, 8, torch.float32, "sum")

    plan = Plan.from_yaml(TWO_BY_TWO)
    right = [trace(0, sum_over(0, 1)), trace(1, sum_over(0, 1)), trace(2, sum_over(2, 3))]
    assert mismatch(right, plan) is None
    sent, got = (Communication(kind, (other,), 8, torch.float32) for kind, other in (("send", 2), ("recv", 0)))
    assert mismatch([trace(0, sent), trace(2, got)], plan) is None
    assert "has ended" not in str(mismatch([trace(0), trace(2, got)], plan))
    assert "wait for each other" in str(mismatch([trace(0), trace(2, got)], plan))
    early, late = (Communication(kind, (2,), 8, torch.float32) for kind in ("recv", "send"))
    crossed = [trace(0, early, late), trace(2, got, Communication("send", (0,), 8, torch.float32))]
    assert "wait for each other" in str(mismatch(crossed, plan))
    other = Communication("all_reduce", (0, 1), 9, torch.float32, "sum")
    assert "rank 0 is in all_reduce of 8" in str(mismatch([trace(0, sum_over(0, 1)), trace(1, other)], plan))
    assert "has ended" in str(mismatch([trace(0, sum_over(0, 1)), trace(1)], plan))


TWO_BY_TWO = """
model: {name: none, fingerprint: ""}
cluster: {gpu: cpu, num_gpus: 4, gpus_per_node: 4}
batch: {global_size: 4}
mesh: {dp: 2}
precision: fp32
blocks: [{name: a, repeats: 2}]
stages: [{first: 0, last: 0}, {first: 1, last: 1}]
"""


@pytest.mark.slow
def test_the_command(
    source: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    captured = captured_of(source, 16)
    path = tmp_path / "plan.yaml"
    plan_of(captured, 4, dp=2, tp=2).save(path)

    def autopar(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["autopar", "check", str(GPT), str(path), "--seq", "64", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0

    assert autopar("--ranks", "3") == 0
    said = capsys.readouterr().out
    assert "agree" in said and "proved: the programs of 4 of 4 ranks" in said
    assert autopar("--ranks", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agree_and_fit"] is True and found["problems"] == []
    assert found["proved_ranks"] == 4
    assert {"rank": 3, "stages": [0]}.items() <= found["ranks"][-1].items()
    assert 0 < found["ranks"][0]["peak_bytes"] < found["budget_bytes"]
    assert autopar("--ranks", "4") == 2
    assert "ranks 0 to 3" in capsys.readouterr().err
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("gpu: cpu\nnum_gpus: 4\nmemory_gb: 0.01\n")
    assert autopar("--cluster", str(cluster)) == 1
    assert "out of memory" in capsys.readouterr().out


def test_bad_ranks(source: ModelFile) -> None:
    captured = captured_of(source, 16)
    with pytest.raises(InvalidInput, match="the plan has ranks 0 to 1"):
        check_plan(source.build, captured, plan_of(captured, 2, dp=2), make_cluster("cpu", 2), ranks=[2])


def test_an_error_of_a_rank_is_told(source: ModelFile) -> None:
    def build() -> nn.Module:
        raise RuntimeError("no weights here")

    captured = captured_of(source, 16)
    with pytest.raises(Exception, match="no weights here"):
        check_plan(build, captured, plan_of(captured, 2, dp=2), make_cluster("cpu", 2))
