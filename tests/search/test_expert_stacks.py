"""Experts whose weights a model makes something of before it multiplies with them."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import op_nodes
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.placement import Shard
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 24, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.transpose(1, 2)).sum()


def test_a_transposed_stack_of_matrices_has_experts() -> None:
    with torch.device("meta"):
        captured = normalise(capture(Stack(), torch.empty(4, 32, 16)))
    workload = Workload.of(captured, "fp32")
    found = {str(node.target): factors for node, factors in workload.expert_factors.items()}
    assert set(found) == {"aten.transpose.int", "aten.bmm.default"}
    (transposed,) = (node for node in op_nodes(captured.graph) if "transpose" in str(node.target))
    first_of_result = workload.rule(transposed).results[0][0]
    assert found["aten.transpose.int"] == frozenset(first_of_result)


def test_experts_of_transposed_weights_are_divided_among_their_ranks() -> None:
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, vocab_size=512, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config)
    tokens = torch.zeros(8, 64, dtype=torch.long, device="meta")
    captured = normalise(capture(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}))
    given = Constraints(ep=4, pp=1, dp=1, tp=1, cp=1, zero=1, precision="bf16", num_microbatches=2)
    plan = estimate_captured(captured, make_cluster("h100-sxm", 4), given).plan
    placed = place_captured(captured, plan)
    experts = {name: own.layout for name, own in placed.storage.items() if "experts" in name and "router" not in name}
    assert len(experts) == 8
    assert set(experts.values()) == {(Shard(0),)}
