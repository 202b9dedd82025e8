"""Plans in words: what a step is counted in, what a node is, and over which ranks experts are."""

from __future__ import annotations

import pytest

from autopar.report.words import counted, experts_words, node_words
from tests.export.plans import decoder_plan, with_experts
from tests.report.sample import sample_plan


def test_a_model_that_reads_no_tokens_is_counted_in_samples() -> None:
    plan = sample_plan()
    assert plan.prediction is not None
    assert counted(plan) == "tokens"
    per_gpu = plan.batch.global_size / plan.prediction.step_time_s / plan.cluster.num_gpus
    of_images = plan.prediction.model_copy(update={"tokens_per_s_per_gpu": per_gpu})
    assert counted(plan.model_copy(update={"prediction": of_images})) == "samples"
    assert counted(plan.model_copy(update={"prediction": None})) == "tokens"


def test_an_assumed_share_of_racks_is_said() -> None:
    cluster = sample_plan().cluster
    assert node_words(cluster) == "8 a node"
    shared = cluster.model_copy(update={"gpus_per_node": 64, "shares_nodes_of": 72})
    assert node_words(shared) == "64 a node (assumed of each rack of 72)"


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"ep": "d0&experts", "tp": "f"}, "experts over ep (2 ranks)"),
        ({"ep": "d0&experts", "cp": "d1&experts", "tp": "d1&experts"}, "experts over cp × ep × tp (16 ranks)"),
        ({"ep": "d0", "tp": "experts"}, "experts over tp (4 ranks, tokens not dispatched on tp)"),
        ({"ep": "d0", "tp": "f"}, ""),
    ],
)
def test_over_which_ranks_experts_are(choices: dict[str, str], words: str) -> None:
    assert experts_words(with_experts(decoder_plan(cp=2, ep=2, tp=4, experts=True), choices)) == words
