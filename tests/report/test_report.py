"""The report says what the plan says, is self-contained, and survives names that look like HTML."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from autopar.cost_model.catalogue import make_cluster
from autopar.report.axes import axes
from autopar.report.data import report_data, step_data
from autopar.report.page import render, render_plain
from autopar.report.terminal import print_plan
from autopar.report.words import block_names, microbatch_size, remat_level
from autopar.units import count, gib, plural, seconds
from tests.report.sample import sample_plan


def test_data_covers_every_block_op_and_stage() -> None:
    plan = sample_plan()
    data = json.loads(json.dumps(report_data(plan)))
    assert [stage["num_blocks"] for stage in data["stages"]] == [5, 4, 4, 5]
    assert [(stage["first_rank"], stage["last_rank"]) for stage in data["stages"]][-1] == (48, 63)
    assert data["stages"][0]["remat"] == {"full": 2, "none": 3}
    assert (data["stages"][1]["from"], data["stages"][1]["to"]) == ("layers.4", "layers.7")
    rows = data["blocks"][1]["rows"]
    assert {row["key"]: row["axes"] for row in rows} == plan.blocks[1].ops
    assert list(dict.fromkeys(row["module"] for row in rows)) == ["", "attention", "mlp"]
    ranks = step_data(plan)["streams"]["ranks"]
    assert [(len(rank["labels"]), rank["kinds"].count("F")) for rank in ranks] == [(32, 16)] * 4


def test_axes_say_which_ranks_they_join_and_what_they_divide() -> None:
    data = report_data(sample_plan())
    assert [(axis["name"], axis["size"], axis["stride"], axis["num_nodes"]) for axis in data["axes"]] == [
        ("pp", 4, 16, 4),
        ("dp", 2, 8, 2),
        ("tp", 8, 1, 1),
    ]
    assert [axis["divides_inputs"] for axis in data["axes"]] == [False, True, False]
    nic, switch = "HDR InfiniBand", "NVLink 3"
    assert [axis["link"]["name"] for axis in data["axes"]] == [nic, nic, switch]
    cluster = make_cluster("a100-80gb", 64)
    assert data["axes"][2]["link"]["bandwidth"] == pytest.approx(cluster.intra_node.ring_bandwidth(8))
    assert all(axis["link"] is None for axis in axes(sample_plan()))
    tensor = {use["factor"]: use["num_ops"] for use in data["axes"][2]["uses"]}
    assert tensor == {"n": 80, "k": 32, "s": 16, "h": 16, "v": 1}
    picture = data["picture"]
    assert (len(picture["nodes"]), picture["num_nodes"]) == (8, 8)
    assert picture["nodes"][3][5] == {"rank": 29, "places": [1, 1, 5]}


def test_derived_figures() -> None:
    plan = sample_plan()
    assert microbatch_size(plan) == 2
    assert remat_level(plan) == "mixed"
    assert block_names(plan)[:3] == ["embedding", "layers.0", "layers.1"]
    assert len(block_names(plan)) == 18


def test_a_plan_without_prediction_has_a_report_too() -> None:
    page = render(sample_plan(predicted=False))
    assert "The step over time" not in page
    assert "Stages" in page


def test_page_is_self_contained_small_and_escaped(tmp_path: Path) -> None:
    sample_plan().report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert len(page.encode()) < 6_000_000
    assert "llama &lt;70b&gt;" in page and "llama <70b>" not in page
    head = page.split("moduleName", 1)[0]
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", head)
    embedded = re.search(r'<script type="application/json" id="plan-data">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1])["model"] == "llama <70b>"


def test_names_of_a_model_are_text() -> None:
    plan = sample_plan()
    evil = "<img src=x onerror=alert(1)>\"'&"
    blocks = [
        plan.blocks[0].model_copy(update={"name": evil, "ops": {f"{evil}/linear": {"dp": "d0"}}}),
        *plan.blocks[1:],
    ]
    page = render(plan.model_copy(update={"blocks": blocks}))
    head = page.split("moduleName", 1)[0]
    assert "onerror=alert(1)&gt;" in head
    assert "<img" not in head.split('id="plan-data"')[0] and "<img" not in head.split('id="plan-data"')[1]


def test_a_notebook_shows_the_plan_without_scripts() -> None:
    shown = sample_plan()._repr_html_()
    assert shown == render_plain(sample_plan())
    assert len(shown) < 100_000
    assert shown.startswith('<iframe srcdoc="&lt;') and "&lt;script" not in shown and shown.count("<") == 2


@pytest.mark.parametrize("predicted", [True, False])
def test_terminal_view(predicted: bool) -> None:
    out = io.StringIO()
    print_plan(sample_plan(predicted=predicted), console=Console(file=out, width=140))
    text = out.getvalue()
    assert "pp 4" in text and "tp 8" in text and "16 microbatches × 2 data-parallel ranks × 2 samples" in text
    assert "attention.query/linear" in text and "layers.* × 16" in text
    assert ("9.84 s a step" in text) is predicted


def test_units() -> None:
    assert [seconds(s) for s in (12.34, 0.0567, 8.9e-5)] == ["12.3 s", "56.7 ms", "89 µs"]
    assert (gib(3 * 2**30), gib(5 * 2**20)) == ("3.0 GiB", "5.0 MiB")
    assert [count(n) for n in (950.0, 2.5e6, 1.234e12)] == ["950", "2.5 million", "1.23 trillion"]
    assert (plural(1, "rank"), plural(1200, "rank")) == ("1 rank", "1,200 ranks")
