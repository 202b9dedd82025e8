"""Small models under plans, and the text of their programs after every pass.

python -m tests.passes.golden.programs     writes the texts anew, to be read before they are kept
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.placed.placed_model import place_captured
from autopar.passes.insert_redistributions import NAME, insert_redistributions
from autopar.passes.normalise import normalise
from autopar.passes.partition import PASSES
from autopar.passes.placed_program import PlacedProgram, run_program_passes
from autopar.passes.printing import captured_text, program_text
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints

FOLDER = Path(__file__).parent
CAPTURED, INSERT = "captured", NAME
STEPS = (CAPTURED, INSERT, *(step.name for step in PASSES))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


class Attends(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.out(attended.transpose(1, 2).reshape(rows, length, width))).square().mean()


def rows_of_8() -> Tensor:
    return torch.empty(2, 8, 16)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what is pinned of its plan, on so many ranks of one node."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    ranks: int
    pinned: dict[str, Any]


CASES = {
    "products-dp-tp": Case(Products, lambda: torch.empty(8, 16), 4, {"dp": 2, "tp": 2}),
    "products-two-microbatches": Case(
        Products, lambda: torch.empty(8, 16), 2, {"dp": 2, "num_microbatches": 2, "precision": "bf16"}
    ),
    "words-tp-bf16": Case(Words, lambda: torch.zeros(4, 8, dtype=torch.int64), 2, {"tp": 2, "precision": "bf16"}),
    "attention-tp": Case(lambda: Attends(2), rows_of_8, 2, {"tp": 2, "sequence_parallel": True}),
    "attention-heads-for-sequence": Case(lambda: Attends(2), rows_of_8, 2, {"cp": 2, "precision": "bf16"}),
    "attention-gathered-keys": Case(lambda: Attends(1), rows_of_8, 2, {"cp": 2}),
}


def texts(case: Case) -> dict[str, str]:
    """The text of the captured model, and of its program after every pass."""
    with torch.device("meta"):
        model, inputs = case.model(), case.inputs()
    captured = normalise(capture(model, inputs))
    constraints = Constraints(**{"precision": "fp32", "zero": 0, **case.pinned})
    placed = place_captured(captured, search_captured(captured, make_cluster("cpu", case.ranks), constraints).plan)
    found = {CAPTURED: captured_text(captured)}

    def note(name: str, program: PlacedProgram) -> None:
        found[name] = program_text(program)

    program = insert_redistributions(placed, "loss")
    note(INSERT, program)
    run_program_passes(program, PASSES, after=note)
    return found


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def written(found: dict[str, str]) -> str:
    """The captured model and its program with redistributions; then what each pass changes, - before and + after."""
    parts = [f"# {step}\n{found[step]}\n" for step in STEPS[:2]]
    for before, step in pairwise(STEPS[1:]):
        lines = unified_diff(found[before].splitlines(), found[step].splitlines(), n=0, lineterm="")
        changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        parts.append(f"# {step}\n" + "\n".join(changed or ["(no change)"]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    for name, case in CASES.items():
        path_of(name).write_text(written(texts(case)))
