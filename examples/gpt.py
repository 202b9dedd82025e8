"""A byte-level language model in the style of Llama, in plain PyTorch.

It reads bytes and predicts the next byte; its training text is the source code of Python's own standard
library, so it needs no download. Nothing here knows about more than one process:

    autopar search examples/gpt.py --gpus 16
    autopar train examples/gpt.py plan.yaml --steps 30
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Config:
    """Sizes of the model. ``num_kv_heads`` < ``num_heads`` is grouped-query attention."""

    width: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    hidden: int = 352
    vocabulary: int = BYTES
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_angles(seq_len: int, config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary position embedding, each (seq_len, head_dim / 2)."""
    frequency = config.rope_base ** (-torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
    angle = torch.arange(seq_len, device=device).float()[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + head_dim / 2]); x is (batch, heads, seq_len, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.width, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.width, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.width, config.num_kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq_len, _ = x.shape

        def heads(projected: Tensor, count: int) -> Tensor:
            return projected.view(batch, seq_len, count, self.config.head_dim).transpose(1, 2)

        q = rotate(heads(self.query(x), self.config.num_heads), cos, sin)
        k = rotate(heads(self.key(x), self.config.num_kv_heads), cos, sin)
        v = heads(self.value(x), self.config.num_kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq_len, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """tokens (batch, seq_len) -> logits (batch, seq_len, vocabulary); with ``targets``, the mean loss instead."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary_angles(tokens.shape[1], self.config, tokens.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model() -> nn.Module:
    """The model that ``examples/gpt.py`` names on the command line; 0.8 million parameters."""
    return GPT(Config())


def gpt_100m() -> nn.Module:
    """``examples/gpt.py:gpt_100m``: the same in 101 million parameters."""
    return GPT(Config(width=768, num_layers=16, num_heads=12, num_kv_heads=4, hidden=2048))


def example_inputs(batch_size: int = 16, seq_len: int = 128) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the shape of one global batch."""
    shape = (batch_size, seq_len)
    return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


@lru_cache(maxsize=1)
def training_text(limit: int = 4_000_000) -> Tensor:
    """The first ``limit`` bytes of the standard library's modules in alphabetical order, as a uint8 tensor."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(batch_size: int = 16, seq_len: int = 128, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of the text: (tokens, targets), each (batch_size, seq_len), the same for one seed."""
    text = training_text()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - seq_len - 1, (batch_size, 1), generator=generator)
        window = text[starts + torch.arange(seq_len + 1)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
