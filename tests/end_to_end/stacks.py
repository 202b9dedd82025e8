"""Plain PyTorch models whose blocks can be counted: stacks of feed-forward or attention blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.analysis.blocks import find_repetition
from autopar.ir.capture.capture import capture
from autopar.ir.plan import Batch, BlockPlan, ClusterRef, ModelRef, Plan, StagePlan
from autopar.passes.normalise import normalise

ROWS, SEQ, WIDTH, HEADS = 4, 8, 32, 4


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).view(*h.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = x + self.o(h.transpose(1, 2).reshape(x.shape))
        return y


class Stack(nn.Module):
    """An embedding, ``depth`` blocks and a head; returns the loss."""

    def __init__(self, block: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def stack(block: type[nn.Module] = FeedForward, depth: int = 2) -> Stack:
    """The same numbers on every call and rank."""
    torch.manual_seed(0)
    return Stack(block, depth)


def batch(step: int = 0) -> dict[str, Any]:
    tokens = torch.randint(0, 16, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def tensor_parallel_plan(model: Stack, ranks: int, *, sequence: bool) -> Plan:
    """The plan of Megatron-LM, written by hand: columns, then rows; with ``sequence``, the sequence in between."""
    captured = normalise(capture(model, batch()))
    repetition = find_repetition(captured)
    columns, between = {"tp": "n"}, {"tp": "d1"} if sequence else {}
    split = {
        "up/linear": columns, "gelu": {"tp": "d2"}, "down/linear": {"tp": "k"},
        "q/linear": columns, "k/linear": columns, "v/linear": columns,
        "attention": {"tp": "h"}, "o/linear": {"tp": "k"},
        "norm/layer_norm": between, "add": between, "embedding": between, "linear": between, "cross_entropy": between,
    }  # fmt: skip
    blocks = [
        BlockPlan(name=kind.name, repeats=kind.repeats, ops={key: split[key] for key in kind.keys if key in split})
        for kind in repetition.kinds
    ]
    return Plan(
        model=ModelRef(name=captured.name, fingerprint=captured.fingerprint),
        cluster=ClusterRef(gpu="cpu", num_gpus=ranks, gpus_per_node=ranks),
        batch=Batch(global_size=ROWS),
        mesh={"tp": ranks},
        blocks=blocks,
        stages=[StagePlan(first=0, last=len(repetition.blocks) - 1)],
    )
