"""State-space models and recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
from models import BATCH, VOCAB, Case, language_batch, random_tokens
from torch import Tensor, nn
from torch.nn import functional as F

from .building import SMALL, hugging_face

_MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4, "expand": 2,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class LSTMLanguageModel(nn.Module):
    """Two LSTM layers between tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.recurrent = nn.LSTM(32, 32, num_layers=2, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(input_ids))
        logits = hidden @ self.embedding.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ConvLSTM(nn.Module):
    """An LSTM whose gates are convolutions, over the frames of a film; predicts the last frame."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.gates = nn.Conv2d(1 + channels, 4 * channels, 3, padding=1)
        self.frame = nn.Conv2d(channels, 1, 1)
        self.channels = channels

    def forward(self, frames: Tensor) -> Tensor:
        rows, length, _, height, width = frames.shape
        hidden = cell = frames.new_zeros(rows, self.channels, height, width)
        for time in range(length - 1):
            gates = self.gates(torch.cat([frames[:, time], hidden], dim=1))
            forget, enter, leave, value = gates.chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(value)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
        return F.mse_loss(self.frame(hidden), frames[:, -1])


class GatedLinearAttention(nn.Module):
    """Linear attention with a decay of each feature of a key, as a recurrence over a matrix of state."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.qkvg = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)
        self.heads = heads

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        rows, length, width = x.shape
        for qkvg, out, norm in zip(self.qkvg, self.out, self.norms):
            shape = (rows, length, self.heads, width // self.heads)
            query, key, value, gate = (t.view(shape) for t in qkvg(norm(x)).chunk(4, dim=-1))
            decay = torch.sigmoid(gate)
            state = x.new_zeros(rows, self.heads, shape[-1], shape[-1])
            read = []
            for time in range(length):
                state = decay[:, time].unsqueeze(-1) * state + key[:, time].unsqueeze(-1) * value[:, time].unsqueeze(-2)
                read.append((query[:, time].unsqueeze(-2) @ state).squeeze(-2))
            x = x + out(torch.stack(read, dim=1).flatten(2))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Translator(nn.Module):
    """A GRU reads, another writes and attends to what was read."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, width), nn.Embedding(VOCAB, width)
        self.reader = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.key = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(2 * width, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.reader(self.source(source))
        start = torch.cat([last[0], last[1]], dim=-1).unsqueeze(0)
        written, _ = self.writer(self.target(target[:, :-1]), start)
        weights = torch.softmax(written @ self.key(memory).transpose(1, 2), dim=-1)
        logits = self.head(torch.cat([written, weights @ memory], dim=-1))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def _films(step: int) -> dict[str, Any]:
    return {"frames": torch.randn(BATCH, 5, 1, 8, 8, generator=torch.Generator().manual_seed(9000 + step))}


def _translations(step: int) -> dict[str, Any]:
    return {"source": random_tokens(step), "target": random_tokens(step + 500)}


RECURRENT = (
    hugging_face("mamba", "MambaForCausalLM", **_MAMBA, time_step_rank=4),
    hugging_face("mamba2", "Mamba2ForCausalLM", **_MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    hugging_face("falcon_mamba", "FalconMambaForCausalLM", **_MAMBA, time_step_rank=4),
    # State-space layers, attention and a mixture of experts in turn.
    hugging_face("jamba", "JambaForCausalLM", **SMALL, num_experts=4, num_experts_per_tok=2, attn_layer_period=2,
                 attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_d_conv=4,
                 mamba_expand=2, mamba_dt_rank=4, use_mamba_kernels=False),
    hugging_face("rwkv", "RwkvForCausalLM", vocab_size=VOCAB, context_length=32, hidden_size=32, num_hidden_layers=2,
                 attention_hidden_size=32, intermediate_size=64, use_cache=False, bos_token_id=1, eos_token_id=2),
    # A gated linear recurrence, and attention to a window.
    hugging_face("recurrent_gemma", "RecurrentGemmaForCausalLM", **SMALL, lru_width=32, attention_window_size=8,
                 conv1d_width=4, block_types=["recurrent", "attention"]),
    Case(name="lstm_lm", build=LSTMLanguageModel, batch=language_batch),
    Case(name="conv_lstm", build=ConvLSTM, batch=_films),
    Case(name="gated_linear_attention", build=GatedLinearAttention, batch=language_batch),
    Case(name="gru_translator", build=Translator, batch=_translations),
)  # fmt: skip
