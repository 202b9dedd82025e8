"""Dropout under every kind of sharding: the masks that were drawn, put into one process, give the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.plan import Plan
from tests.harness import run_ranks

ROWS, SEQ, WIDTH, HEADS, KEEP = 8, 4, 16, 4, 0.75
RANKS = 4


class Layer(nn.Module):
    """A feed-forward block with dropout inside it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, masks: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """masks: of the two dropouts, or none, then they are drawn. Returns what goes in and out of each dropout."""
        seen = []
        for number, compute in enumerate((lambda h: F.gelu(self.up(self.norm(h))), self.down)):
            before = compute(x if not seen else seen[-1])
            seen += [before, before * masks[number] if masks else F.dropout(before, 1 - KEEP)]
        return x + seen[-1], seen


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, labels: Tensor, masks: Any = ()) -> dict[str, Any]:
        x, seen = self.embed(tokens), []
        for number, layer in enumerate(self.layers):
            x, more = layer(x, masks[2 * number : 2 * number + 2] if masks else [])
            seen += more
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), "seen": seen}


class Attentive(nn.Module):
    """Dropout inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=1 - KEEP)
        x = x + self.o(h.transpose(1, 2).reshape(x.shape))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 16, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def _parallel(
    kind: type[nn.Module], remat: str, seed: int = 0, copied: bool = False, **constraints: Any
) -> autopar.ParallelModule:
    """The best plan within the constraints, but with every block rematerialised as ``remat``.

    copied: and every dropout whole on all ranks of the tensor axes.
    """
    model = _model(kind)
    torch.manual_seed(seed)
    found = autopar.parallelize(model, RANKS, example_inputs=_batch(), **constraints).plan.model_dump(mode="json")
    for stage in found["stages"]:
        stage["remat"] = {remat: stage["last"] - stage["first"] + 1} if remat != "none" else {}
    if copied:
        for block in found["blocks"]:
            block["ops"] = {key: split for key, split in block["ops"].items() if "dropout" not in key}
    return autopar.parallelize(model, RANKS, example_inputs=_batch(), plan=Plan.model_validate(found))


def _forward(remat: str, constraints: dict[str, Any]) -> dict[str, Any]:
    parallel = _parallel(Dropped, remat, **constraints)
    torch.manual_seed(dist.get_rank())  # ranks need not be in the same state
    output = parallel(**parallel.shard_batch(_batch()))
    output["loss"].backward()
    return {
        "rows": parallel.data_parallel_rank,
        "loss": output["loss"].detach(),
        "seen": [one.detach() for one in output["seen"]],
        "gradients": parallel.full_gradients(),
        "code": parallel.code,
    }


def _forward_each(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [_forward(*case) for case in cases]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp4": ("none", {"tp": 4, "sp": False}),
    "tp4-copied-full": ("full", {"tp": 4, "sp": False, "copied": True}),
    "tp4-copied-selective": ("selective", {"tp": 4, "sp": False, "copied": True}),
    "tp4-sequence-full": ("full", {"tp": 4, "sp": True}),
    "dp2-tp2": ("full", {"dp": 2, "tp": 2, "zero": 0}),
    "zero3-dp2-tp2": ("selective", {"dp": 2, "tp": 2, "zero": 3}),
}


@pytest.fixture(scope="module")
def forwards() -> list[list[dict[str, Any]]]:
    return run_ranks(_forward_each, RANKS, list(CASES.values()))


@pytest.mark.parametrize("case", CASES)
def test_masks_replayed_in_one_process_give_the_same_training(case: str, forwards: list[list[dict[str, Any]]]) -> None:
    ranks = [rank[list(CASES).index(case)] for rank in forwards]
    by_rows: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        by_rows.setdefault(rank["rows"], []).append(rank)
    for group in by_rows.values():
        for rank in group[1:]:
            torch.testing.assert_close(rank["seen"], group[0]["seen"], rtol=0, atol=0, msg="copies dropped alike")
    parts = [group[0]["seen"] for _, group in sorted(by_rows.items())]
    seen = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
    masks = [(after != 0) / KEEP for after in seen[1::2]]
    for mask in masks:
        assert KEEP - 0.1 < mask.count_nonzero() / mask.numel() < KEEP + 0.1
        for dim in range(mask.dim()):
            assert all(not torch.equal(*pair) for pair in _pairs(mask.chunk(2 if dim == 1 else 4, dim))), "independent"

    alone = _model(Dropped)
    alone(**_batch(), masks=masks)["loss"].backward()
    for name, parameter in alone.named_parameters():
        for rank in ranks:
            torch.testing.assert_close(rank["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def _pairs(pieces: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(a, b) for number, a in enumerate(pieces) for b in pieces[:number]]


def _steps(kind: type[nn.Module], remat: str, seed: int, constraints: dict[str, Any]) -> dict[str, Any]:
    parallel = _parallel(kind, remat, seed, **constraints)
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    losses = []
    for _ in range(2):
        parallel.zero_grad()
        losses.append(float(parallel.step(**parallel.shard_batch(_batch()))))
    assert torch.equal(torch.get_rng_state(), before), "a step leaves the user's generator alone"
    return {"losses": losses, **parallel.full_gradients()}


def _steps_each(kind: type[nn.Module], constraints: dict[str, Any]) -> list[dict[str, Any]]:
    return [_steps(kind, *case, constraints) for case in (("none", 0), ("none", 0), ("full", 0), ("none", 1))]


@pytest.mark.parametrize("kind", [Dropped, Attentive])
def test_one_seed_gives_one_training_through_a_pipeline(kind: type[nn.Module]) -> None:
    results = run_ranks(
        _steps_each, RANKS, kind, {"pp": 2, "tp": 2, "schedule": "1f1b", "num_microbatches": 4, "copied": True}
    )
    for first, again, recomputed, other in results:
        assert first["losses"] == results[0][0]["losses"]
        assert first["losses"][0] != first["losses"][1], "each step draws anew"
        assert first["losses"] != other["losses"], "as does each seed"
        for name, value in first.items():
            torch.testing.assert_close(again[name], value, rtol=0, atol=0, msg=name)
            torch.testing.assert_close(recomputed[name], value, rtol=1e-5, atol=1e-7, msg=name)
