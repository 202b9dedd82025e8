"""The sequence in zigzag layout: the two functions, and where models change order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.cost_model.compute.flops import op_name
from autopar.ir.analysis.batch_and_sequence import find_roles
from autopar.ir.analysis.blocks import find_repetition
from autopar.ir.analysis.zigzag import ZigzagSequence, find_zigzag, from_zigzag, to_zigzag
from autopar.ir.capture.capture import capture
from autopar.ir.sequence import spans
from autopar.passes.normalise import normalise

LENGTH = 16


@given(outer=st.integers(1, 3), chunk=st.integers(1, 3), inner=st.integers(1, 3), zigzag_ranks=st.integers(1, 4))
def test_zigzag_is_the_stored_order(outer: int, chunk: int, inner: int, zigzag_ranks: int) -> None:
    length = 2 * zigzag_ranks * chunk
    x = torch.arange(2 * outer * length * inner).view(2, outer * length * inner)
    zigzag = to_zigzag(x, dim=1, length=length, inner=inner, zigzag_ranks=zigzag_ranks)
    order = [position for span in spans(length, zigzag_ranks) for position in range(*span)]
    expected = x.view(2, outer, length, inner)[:, :, order].flatten(1)
    assert torch.equal(zigzag, expected)
    assert torch.equal(from_zigzag(zigzag, dim=1, length=length, inner=inner, zigzag_ranks=zigzag_ranks), x)


class Attention(nn.Module):
    """One causal attention between an embedding and a head; ``touch`` does something to its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.positions = nn.Parameter(torch.zeros(LENGTH, 8))

    def touch(self, x: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.touch(self.embed(tokens))
        h = x.unflatten(2, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True, dropout_p=self.dropout)
        x = x + h.transpose(1, 2).flatten(2)
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class WithConvolution(Attention):
    def touch(self, x: Tensor) -> Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class WithParameter(Attention):
    def touch(self, x: Tensor) -> Tensor:
        return x + self.positions


def _zigzag(model: nn.Module, inputs: dict[str, Tensor]) -> ZigzagSequence:
    captured = normalise(capture(model, inputs))
    return find_zigzag(captured, find_repetition(captured), find_roles(captured))


def _inputs(name: str = "tokens") -> dict[str, Tensor]:
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return {name: tokens, "labels": tokens.clone()}


def test_decoders_change_order_only_at_the_edge_of_their_blocks() -> None:
    size = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1}
    llama = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, **size)
    gpt2 = GPT2Config(n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **size)
    for model, entries in (
        (LlamaForCausalLM(llama), {"embedding", "mul", "cross_entropy"}),
        (GPT2LMHeadModel(gpt2), {"embedding", "cross_entropy"}),
    ):
        zigzag = _zigzag(model, _inputs("input_ids"))
        assert zigzag.obstacle is None and zigzag.length == LENGTH
        assert len(zigzag.attentions) == 2 and not zigzag.back
        assert {op_name(node) for node, _ in zigzag.into} == entries


def test_what_minds_the_order_gets_it_back() -> None:
    zigzag = _zigzag(Attention(), _inputs())
    assert zigzag.obstacle is None
    assert [op_name(node) for node, _ in zigzag.back] == ["slice"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (WithConvolution(), "minds the order"),
        (WithParameter(), "parameter positions runs along the sequence"),
        (Attention(dropout=0.5), "no causal attention"),
        (nn.Sequential(nn.Linear(4, 4)), "no causal attention"),
    ],
)
def test_obstacles(model: nn.Module, reason: str) -> None:
    inputs = {"input": torch.zeros(2, 4)} if isinstance(model, nn.Sequential) else _inputs()
    obstacle = _zigzag(model, inputs).obstacle
    assert obstacle is not None and reason in obstacle
