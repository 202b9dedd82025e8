"""Steps on batches of documents: against the prediction of full rows, and against sums by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.documents import Documents
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.lengths import LengthHistogram
from autopar.ir.plan import Plan
from autopar.passes.normalise import normalise
from autopar.planning_lengths import Dataset, with_lengths
from autopar.search.api import estimate_captured, predict_plan
from autopar.search.predict.documents import Batch, Rows, predict_steps
from autopar.search.predict.predict import Predicted
from autopar.search.problem.constraints import Constraints

CLUSTER = make_cluster("cpu", 2, 2)
BATCH, LENGTH = 8, 256
PLANS = {
    "dp2": Constraints(dp=2, zero=0, num_microbatches=1),
    "tp2": Constraints(tp=2, num_microbatches=2),
    "pp2": Constraints(pp=2, num_microbatches=4),
    "zero3": Constraints(dp=2, zero=3, num_microbatches=2),
}


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def inputs() -> dict[str, torch.Tensor]:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta")
    return dict.fromkeys(("input_ids", "labels", "position_ids"), tokens)


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    return normalise(capture(model(), inputs()))


def plan_of(captured: CapturedModel, name: str, documents: Documents | None = None) -> Plan:
    return estimate_captured(captured, CLUSTER, replace(PLANS[name], documents=documents)).plan


def batches(plan: Plan, rows: Sequence[Documents]) -> list[Batch]:
    """One for each of ``rows``, with which all microbatches are."""
    count = plan.batch.num_microbatches
    return [[[Rows(LENGTH, own)] * count] * plan.data_parallel_size for own in rows]


@pytest.mark.parametrize("name", PLANS)
def test_equal_rows_take_what_the_prediction_says(captured: CapturedModel, name: str) -> None:
    plan = plan_of(captured, name)

    def at(length: int, documents: Documents | None) -> Predicted:
        assert length == LENGTH
        return predict_plan(captured, CLUSTER, plan, documents=documents)

    kinds = [Documents(((LENGTH, 1.0),)), Documents(((16, 16.0),)), Documents(((16, 8.0), (128, 1.0)))]
    found = predict_steps(plan, batches(plan, kinds), at)
    for seconds, documents in zip(found.seconds, kinds, strict=True):
        assert seconds == pytest.approx(at(LENGTH, documents).step_time_s, rel=5e-3)


def test_ranks_wait_for_the_one_with_the_longest_documents(captured: CapturedModel) -> None:
    short, long = (Rows(LENGTH, Documents(((n, LENGTH / n),))) for n in (16, LENGTH))
    together = plan_of(captured, "zero3")
    apart = together.model_copy(update={"zero": 0, "shard_axes": None})

    def step(plan: Plan, batch: Batch, *, meets: bool) -> float:
        def at(length: int, documents: Documents | None) -> Predicted:
            found = predict_plan(captured, CLUSTER, plan, documents=documents)
            if not meets:
                own = {name: s for name, s in found.breakdown_s.items() if not name.startswith("communication")}
                found = replace(found, explain=lambda: own)
            return found

        return predict_steps(plan, [batch], at).seconds[0]

    # Each rank has a long microbatch: who meets in each waits twice.
    crossed, even = [[short, long], [long, short]], [[short, long], [short, long]]
    all_long = [[long, long], [short, short]]
    assert step(together, crossed, meets=True) == pytest.approx(step(together, all_long, meets=True))
    assert step(apart, crossed, meets=False) == pytest.approx(step(apart, even, meets=False))
    assert step(apart, all_long, meets=False) > 1.02 * step(apart, crossed, meets=False)


def test_padded_batches_cost_what_their_longest_rows_do(captured: CapturedModel) -> None:
    plan = plan_of(captured, "dp2")
    data = Dataset(histogram=LengthHistogram(edges=(32, 257), counts=(100,)), packed=False)
    found = with_lengths(plan, data, captured, CLUSTER, model(), inputs()).prediction
    assert found is not None
    assert found.lengths is not None
    assert not found.lengths.packed
    # The longest of four of each rank is 4/5 of the way from 32 to 256, the longer of the two ranks' 8/9.
    assert found.lengths.computed_tokens == pytest.approx(BATCH * (32 + 0.8 * 224), rel=0.05)
    assert found.lengths.even_step_time_s < found.lengths.step_time_s < found.step_time_s
    assert found.lengths.fast_step_time_s < found.lengths.step_time_s < found.lengths.slow_step_time_s


def test_the_search_sees_how_short_documents_are(captured: CapturedModel) -> None:
    short = Dataset(histogram=LengthHistogram(edges=(8, 17), counts=(1,))).documents_of(captured)
    assert short is not None
    assert sum(n * count for n, count in short.lengths) == pytest.approx(LENGTH, rel=0.05)
    bare = replace(CLUSTER, device=replace(CLUSTER.device, kernel_launch_s=0.0, memory_bandwidth=1e15))
    found = [
        estimate_captured(captured, bare, replace(PLANS["tp2"], documents=documents)).predicted.step_time_s
        for documents in (None, short)
    ]
    assert found[1] < found[0]
