"""Context parallelism against one process: ring, gathered keys and heads, in natural order and in zigzag layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import AutoparError, InvalidPlan, PlanMismatch
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.plan import Plan
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.local_cluster import local_cluster
from autopar.passes.normalise import normalise
from autopar.passes.partition import partition
from autopar.search.api import predict_plan, search_captured
from autopar.search.problem.constraints import Constraints
from tests.harness import run_ranks
from tests.parity import with_attention

RANKS, LENGTH = 4, 16
SIZE = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=1, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SIZE)
        return GPT2LMHeadModel(config)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, **heads, **SIZE))


def _batch(step: int = 0, padded: bool = False) -> dict[str, Tensor]:
    tokens = torch.randint(0, 32, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if padded:
        batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])).long()
    return batch


def _plan(name: str, attention: dict[str, str], layout: str, **constraints: Any) -> Plan:
    """The plan of the search with other choices for every attention."""
    padded = constraints.pop("padded", False)
    found = autopar.search(_model(name), RANKS, example_inputs=_batch(padded=padded), dp=1, **constraints)
    return with_attention(found, attention, layout)


def _differences(name: str, plan: Plan, padded: bool) -> tuple[dict[str, float], str]:
    """Of losses over steps with SGD between them, of gradients, and of logits; and the sends."""
    given = _batch(padded=padded)
    parallel = autopar.parallelize(_model(name), dist.get_world_size(), example_inputs=given, plan=plan)
    alone = _model(name)
    mine, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, alone))
    found: dict[str, float] = {}
    for step in range(2):
        batch = _batch(step, padded)
        mine.zero_grad()
        own.zero_grad()
        with CollectiveCounter() as counter:
            loss = parallel.step(**parallel.shard_batch(batch))
        expected = alone(**batch).loss
        expected.backward()
        found[f"loss {step}"] = float(loss.detach()) - float(expected.detach())
        gradients = parallel.full_gradients()
        for key, parameter in alone.named_parameters():
            assert parameter.grad is not None
            found[f"{key} {step}"] = float((gradients[key] - parameter.grad).abs().max())
        mine.step()
        own.step()
    if len(plan.stages) > 1:
        return found, str(counter)  # no plain forward through a pipeline
    found["logits"] = float((parallel(**parallel.shard_batch(batch))["logits"] - alone(**batch).logits).abs().max())
    return found, str(counter)


CASES: dict[str, tuple[str, dict[str, str], str, dict[str, Any]]] = {
    "llama-ring": ("llama", {"cp": "s&t"}, "contiguous", {"cp": 4}),
    "llama-ring-zigzag": ("llama", {"cp": "s&t"}, "zigzag", {"cp": 4}),
    "llama-ring-zigzag-selective": ("llama", {"cp": "s&t"}, "zigzag", {"cp": 4, "remat": "selective"}),
    "llama-gathered-zigzag": ("llama", {"cp": "s"}, "zigzag", {"cp": 4}),
    "llama-ulysses-ring-zigzag": ("llama", {"cp": "s&t", "tp": "h"}, "zigzag", {"cp": 2, "tp": 2, "sp": True}),
    "llama-padded-zigzag": ("llama", {"cp": "s&t"}, "zigzag", {"cp": 4, "padded": True}),
    "gpt2-ring-zigzag": ("gpt2", {"cp": "s&t"}, "zigzag", {"cp": 4}),
    "gpt2-ulysses": ("gpt2", {"cp": "h"}, "contiguous", {"cp": 4}),
    "llama-pipeline-zigzag": ("llama", {"cp": "s&t"}, "zigzag", {"cp": 2, "pp": 2, "num_microbatches": 2}),
}
FAST = ("llama-ring-zigzag-selective",)


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_equals_one_process(case: str) -> None:
    name, attention, layout, constraints = CASES[case]
    plan = _plan(name, attention, layout, **constraints)
    for differences, sent in run_ranks(_differences, RANKS, name, plan, constraints.get("padded", False)):
        assert max(map(abs, differences.values())) < 2e-5, differences
        if attention["cp"] == "h":
            assert sent.count("all_to_all") == 2, "from the sequence to heads and back, forward and backward"
        if attention["cp"] == "s&t" and "pp" not in constraints:
            # A layer of N ranks: N - 1 sends of keys and values forward, 2 N - 1 of them and of gradients backward.
            layers, count = (1 if name == "gpt2" else 2), constraints["cp"]
            assert f"{layers * (count - 1)} send" in sent.split(";")[0]
            assert f"{layers * (2 * count - 1)} send" in sent.split(";")[1]


def test_the_search_balances_unless_it_is_told_not_to() -> None:
    options = {"example_inputs": _batch(), "cp": 4, "dp": 1, "tp": 1}
    plans = [autopar.search(_model("llama"), 4, **options, **pin) for pin in ({}, {"sequence_layout": "contiguous"})]
    assert [plan.sequence_layout for plan in plans] == ["zigzag", "contiguous"]
    with pytest.raises(AutoparError, match="expected contiguous or zigzag"):
        autopar.search(_model("llama"), 4, **options, sequence_layout="striped")
    with pytest.raises(AutoparError, match=r"(?s)zigzag order: it has no causal attention.*try: --sequence-layout"):
        autopar.search(nn.Linear(4, 4), 4, example_inputs={"input": torch.zeros(8, 4)}, sequence_layout="zigzag")


def test_a_second_forward_is_priced_without_the_ring() -> None:
    """With so few tokens recomputation is starts of kernels, and one rank has nearly as many as a rank of a ring."""
    captured = normalise(capture(_model("llama"), _batch()))
    ring = _plan("llama", {"cp": "s&t"}, "zigzag", cp=4, remat="selective")
    alone = autopar.search(_model("llama"), 1, example_inputs=_batch(), remat="selective")
    again = [
        predict_plan(captured, make_cluster("h100-sxm", plan.num_ranks, 1), plan).breakdown_s["rematerialization"]
        for plan in (ring, alone)
    ]
    assert again[0] == pytest.approx(again[1], rel=0.25)


def test_a_ring_of_a_sequence_that_does_not_divide_is_refused_with_its_sizes_and_line() -> None:
    inputs = {key: value[:, :13] for key, value in _batch().items()}
    captured = normalise(capture(_model("llama"), inputs))
    found = search_captured(captured, local_cluster(4, torch.device("cpu")), Constraints(cp=2, dp=2, tp=1)).plan
    with pytest.raises(InvalidPlan, match=r"(?s)attention.* has factors .*s=13, t=13.*at .*\.py:\d+.*a smaller axis"):
        place_captured(captured, with_attention(found, {"cp": "s&t"}))


def test_a_sequence_that_cannot_be_in_zigzag_layout_is_refused() -> None:
    inputs = {key: value[:, :12] for key, value in _batch().items()}
    captured = normalise(capture(_model("llama"), inputs))
    plan = search_captured(captured, local_cluster(4, torch.device("cpu")), Constraints(cp=4, dp=1, tp=1)).plan
    assert plan.sequence_layout == "contiguous", "12 positions do not divide into 8 chunks"
    with pytest.raises(PlanMismatch, match=r"(?s)12 positions do not divide by 8.*: contiguous"):
        partition(place_captured(captured, plan.model_copy(update={"sequence_layout": "zigzag"})))
    with pytest.raises(AutoparError, match=r"(?s)12 on cp=4 ranks.*divide by 8.*try: another --cp or --seq"):
        autopar.search(_model("llama"), 4, example_inputs=inputs, cp=4, dp=1, tp=1, sequence_layout="zigzag")
