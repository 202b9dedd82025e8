"""Where a sequence lies, from a plan alone: every token on as many ranks as do not divide the sequence."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.ir.plan import Batch, BlockPlan, ClusterRef, ModelRef, Plan, StagePlan
from autopar.report.whereabouts import SequencePlaces, sequence_data


def plan(mesh: dict[str, int], attention: dict[str, str], layout: str, length: int | None = 4096) -> Plan:
    ranks = 1
    for size in mesh.values():
        ranks *= size
    rows = {axis: "d1" for axis in mesh if axis.startswith("cp")}
    return Plan(
        model=ModelRef(name="decoder", fingerprint="0", seq=length),
        cluster=ClusterRef(gpu="h100-sxm", num_gpus=ranks, gpus_per_node=8),
        batch=Batch(global_size=1),
        mesh=mesh,
        sequence_layout=layout,  # type: ignore[arg-type]
        blocks=[BlockPlan(name="layers.*", repeats=2, ops={"q/linear": rows, "self_attn/attention": attention})],
        stages=[StagePlan(first=0, last=1)],
    )


@pytest.mark.parametrize(
    ("mesh", "attention", "layout", "copies", "words"),
    [
        ({"cp": 16}, {"cp": "s&t"}, "zigzag", 1, "256 a rank, in 2 parts (zigzag, so that all have equal work); keys"),
        ({"cp": 2, "tp": 4, "cp2": 4}, {"cp": "s&t", "tp": "h", "cp2": "s"}, "zigzag", 4, "gathered over cp2 4"),
        ({"tp": 2, "cp": 8}, {"tp": "h", "cp": "h"}, "contiguous", 2, "exchanged for heads"),
        ({"cp": 4, "cp2": 2}, {"cp": "s&t", "cp2": "h"}, "zigzag", 1, "a ring over cp 4; over cp2 2"),
    ],
)
def test_every_token_has_its_ranks(
    mesh: dict[str, int], attention: dict[str, str], layout: str, copies: int, words: str
) -> None:
    own = plan(mesh, attention, layout)
    places = SequencePlaces.of(own)
    assert places is not None and words in places.words
    held = Counter(token for rank in range(own.num_ranks) for span in places.held(rank) for token in range(*span))
    assert held == dict.fromkeys(range(4096), copies)
    data = sequence_data(own)
    assert data is not None
    assert [[tuple(span) for span in one["spans"]] for node in data["nodes"] for one in node] == [
        [tuple(span) for span in places.held(rank)] for rank in range(own.num_ranks)
    ]


def test_a_whole_sequence_lies_nowhere() -> None:
    assert SequencePlaces.of(plan({"tp": 8}, {"tp": "h"}, "contiguous")) is None
    assert SequencePlaces.of(plan({"cp": 8}, {"cp": "s"}, "contiguous", None)) is None
