"""A report of a plan whose model is at hand: what is communicated where, the step over time, what else was tried."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.offload import Offload
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file
from autopar.planning import Planned, find_plan
from autopar.report.data import report_data, step_data
from autopar.report.page import render
from autopar.report.study import Study, study_found, study_plan
from autopar.search.problem.constraints import Constraints

GPT = "examples/gpt.py"


def found(num_gpus: int = 4, gpu: str = "h100-sxm", **given: object) -> Planned:
    source = load_model_file(GPT)
    return find_plan(
        source.meta_model(),
        make_cluster(gpu, num_gpus),
        source.meta_inputs(64, None),
        inputs_of=lambda size: source.meta_inputs(size, None),
        constraints=Constraints(**given),  # type: ignore[arg-type]
        pin_degrees=bool(given),
        name=source.name,
    )


@cache
def pipelined() -> Study:
    return study_found(found(pp=2, tp=2, dp=2, num_gpus=8, zero=1, num_microbatches=4), vary=False)


@cache
def searched() -> Study:
    return study_found(found())


def test_collectives_stand_before_the_op_that_needs_them() -> None:
    data = json.loads(json.dumps(report_data(pipelined().plan, pipelined())))
    layer = next(block for block in data["blocks"] if block["repeats"] > 1)
    kinds = [row["row"] for row in layer["rows"]]
    assert set(kinds) == {"op", "collective", "sync"} and kinds[0] == "sync"
    for number, row in enumerate(layer["rows"]):
        if row["row"] == "collective" and row["num_bytes"] is not None:
            assert row["forward_s"] + row["backward_s"] > 0 and set(row["axes"]) <= set(data["mesh"])
            following = [later["key"] for later in layer["rows"][number:] if later["row"] == "op"]
            assert following or row is layer["rows"][-1]
    # All that is waited for inside blocks is listed.
    listed = sum(row["step_s"] for block in data["blocks"] for row in block["rows"] if row["row"] == "collective")
    waited = sum(s for name, s in data["prediction"]["breakdown_s"].items() if name.startswith("communication"))
    assert 0.4 * listed <= waited <= 1.01 * listed


def test_the_step_is_drawn_as_it_is_predicted() -> None:
    study = pipelined()
    step = json.loads(json.dumps(step_data(study.plan, study)))
    streams = step["streams"]
    assert streams["step_time_s"] == study.predicted.overlapped_s
    for rank in streams["ranks"]:
        computing = [n for n, lane in enumerate(rank["lanes"]) if lane == "0"]
        assert sum(rank["kinds"][n] == "O" for n in computing) == 1
        assert {"F", "B"} <= {rank["kinds"][n] for n in computing}
        assert all(0 <= a <= b <= 1_000_000 for a, b in zip(rank["starts"], rank["ends"], strict=True))
        ends = [rank["ends"][n] for n in computing]
        assert all(rank["starts"][n] >= before for n, before in zip(computing[1:], ends, strict=False))
    assert max(max(rank["ends"]) for rank in streams["ranks"]) == 1_000_000
    sent = [label for rank in streams["ranks"] for label in rank["labels"] if "to stage" in label]
    assert len(sent) == 2 * study.plan.batch.num_microbatches


def test_memory_over_the_step_peaks_where_the_plan_says() -> None:
    study = pipelined()
    for rank, one in enumerate(step_data(study.plan, study)["memory"]):
        assert len(one["passes"]) == 2 * study.plan.batch.num_microbatches
        most = max(sum(parts) for parts in zip(*one["mib"].values(), strict=True))
        predicted = study.predicted.memory[rank].total / 2**20
        assert most <= predicted + 6
        held = [parts.total for _, parts in study.predicted.memory_profile(rank)]
        assert max(held) <= study.predicted.memory[rank].total * (1 + 1e-9)
        assert max(held) > 0.9 * study.predicted.memory[rank].total


def test_what_was_tried_is_there_with_its_front() -> None:
    data = report_data(searched().plan, searched())
    tried = data["candidates"]
    assert sum(one["chosen"] for one in tried) == 1
    chosen = next(one for one in tried if one["chosen"])
    assert chosen["step_time_s"] == min(one["step_time_s"] for one in tried)
    front = [one for one in tried if one["front"]]
    assert front and all(a["peak_bytes"] > b["peak_bytes"] for a, b in pairwise(front))
    names = {one["baseline"] for one in tried} - {None}
    assert names and names <= {one["name"] for one in data["search"]["baselines"]}


def test_variations_are_searches_of_their_own() -> None:
    found = {one["what"]: one for one in report_data(searched().plan, searched())["variations"]}
    assert list(found) == [
        "a network 0.5 × as fast",
        "a network 2 × as fast",
        "20.0 % less memory",
        "20.0 % more memory",
        "a batch of 32",
        "a batch of 128",
    ]
    now = searched().predicted.step_time_s
    assert found["a network 0.5 × as fast"]["step_time_s"] >= now >= found["a network 2 × as fast"]["step_time_s"]
    assert found["a batch of 32"]["step_time_s"] < now < found["a batch of 128"]["step_time_s"]


def test_a_variation_that_does_not_fit_says_why() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(1024, 2**20)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.up(x).square().mean()

    with torch.device("meta"):
        model, x = Wide(), torch.zeros(8, 1024)
    needs = find_plan(model, make_cluster("h100-sxm", 1), (x,)).plan.prediction
    assert needs is not None
    cluster = make_cluster("h100-sxm", 1).with_memory(int(needs.peak_memory_bytes * 1.1))
    study = study_found(find_plan(model, cluster, (x,), constraints=Constraints(remat="none", offload=Offload.NONE)))
    less, more = study.variations
    assert less.plan is None and "GiB" in less.reason
    assert more.plan is not None


def test_a_plan_from_a_file_is_studied_with_its_model() -> None:
    plan = Plan.from_yaml(pipelined().plan.to_yaml()).model_copy(update={"prediction": None})
    workload = pipelined().workload
    study = study_plan(workload.captured, pipelined().cluster, plan)
    assert study.plan.prediction == pytest.approx(pipelined().plan.prediction)
    page = render(study.plan, study)
    assert "The step over time" in page and "What else was tried" not in page
    assert len(page.encode()) < 6_000_000
