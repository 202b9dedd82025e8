"""Plans that are nearly right: each is refused with one message, or shown, drawn, exported, compared, partitioned."""

from __future__ import annotations

import random
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autopar.cli.check import cluster_of
from autopar.cost_model.catalogue import make_cluster
from autopar.export import TARGETS, Options, export
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.plan import Plan
from autopar.passes.partition import partition
from autopar.report.comparison import comparison, in_words, print_comparison
from autopar.report.data import report_data, step_data
from autopar.report.page import render_plain
from autopar.report.terminal import print_plan
from autopar.search.api import search_captured
from autopar.search.on_stack import predict_on_stack
from autopar.search.problem.constraints import Constraints
from tests.export.plans import decoder_plan
from tests.fuzz.harness import Read, failures, none_of
from tests.fuzz.models import captured_net
from tests.fuzz.mutation import as_yaml, changed_value
from tests.report.sample import sample_plan

_OWN = 3


@cache
def plans() -> list[tuple[Plan, Any]]:
    """Plans, and what their files hold. The last ``_OWN`` are of ``captured_net``."""
    own = [
        search_captured(captured_net(), make_cluster("h100-sxm", 4), Constraints(tp=2)).plan,
        search_captured(captured_net(), make_cluster("h100-sxm", 4), Constraints(pp=2, num_microbatches=2)).plan,
        search_captured(captured_net(), make_cluster("h100-sxm", 4), Constraints(tp=2, remat=0.5)).plan,
    ]
    assert len(own) == _OWN
    assert own[-1].kept_sets
    others = [
        sample_plan(),
        decoder_plan(pp=2, dp=2, tp=2, num_microbatches=4, predicted=True),
        decoder_plan(dp=4, cp=2, zero=3, shard=2),
        decoder_plan(pp=2, virtual_stages=2, num_microbatches=4, schedule="interleaved", ep=2, experts=True),
    ]
    return [(plan, plan.model_dump(mode="json", exclude_none=True)) for plan in (*others, *own)]


def read(chance: random.Random, folder: Path) -> None:
    number = chance.randrange(len(plans()))
    original, data = plans()[number]
    (folder / "plan.yaml").write_bytes(as_yaml(changed_value(data, chance), chance))
    plan = Plan.load(folder / "plan.yaml")
    console = Console(file=StringIO(), width=100)
    print_plan(plan, console=console, whole=True)
    step_data(plan, None)
    report_data(plan)
    used = [
        lambda: print_comparison(comparison(original, plan), ("a", "b"), console=console),
        lambda: in_words(comparison(plan, original), ("a", "b")),
        lambda: render_plain(plan),
        lambda: export(plan, chance.choice(sorted(TARGETS)), Options(plan_path="plan.yaml")),
    ]
    if number >= len(plans()) - _OWN:
        used.append(lambda: partition(place_captured(captured_net(), plan), outputs="loss"))
        used.append(lambda: predict_on_stack(captured_net(), cluster_of(plan, None), plan))
    chance.choice(used)()


KINDS = [("plan", read, 1000)]


@pytest.mark.parametrize(("kind", "read", "count"), KINDS)
def test_an_input_is_read_or_refused(kind: str, read: Read, count: int, tmp_path: Path) -> None:
    plans()
    none_of(failures(kind, read, count, tmp_path))
