"""Steps of other batches and lengths than the plan's equal those of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.models import CASES
from tests.harness import run_ranks
from tests.parity import relative

# Rows of the global batch, and length; the plan is for 8 and 16. With 2 data-parallel ranks or microbatches one has no
# row of 1, and of 5 one has more than the other.
SIZES = ((8, 16), (4, 10), (1, 7), (5, 9), (16, 24))


def batch_of(case: str, rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Tokens of that batch and length, part of the labels left out."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in CASES[case].batch(0).items():
        shape = [rows, length] if tensor.dim() == 2 else [rows, *tensor.shape[1:]]
        if tensor.is_floating_point():
            found[name] = torch.randn(shape, generator=generator)
        elif name == "attention_mask":
            found[name] = torch.ones(shape, dtype=tensor.dtype)
        else:
            found[name] = torch.randint(3, 8, shape, generator=generator)
    if "labels" in found:
        found["labels"][:, -2:] = -100
    return found


def errors_of_steps(parallel: Any, alone: nn.Module, case: str, sizes: Iterable[tuple[int, int]]) -> list[float]:
    """Largest error of each step of a module beside one process: of the loss, and of any gradient."""
    one = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    many = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    errors = []
    for step, (rows, length) in enumerate(sizes):
        given = batch_of(case, rows, length, step)
        one.zero_grad()
        many.zero_grad()
        loss = alone(**given).loss
        loss.backward()
        got = parallel.step(**parallel.shard_batch(given))
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        errors += [abs(got.item() / loss.item() - 1), relative(parallel.full_gradients(), expected)]
        one.step()
        many.step()
    return errors


def train(case: str, sizes: tuple[tuple[int, int], ...], constraints: dict[str, Any]) -> tuple[list[float], int]:
    """Largest error of each step: of the loss, and of any gradient; and the number of programs at the end."""
    torch.manual_seed(0)
    model = CASES[case].build()
    alone = copy.deepcopy(model)
    given = batch_of(case, 8, 16, 0)
    parallel = autopar.parallelize(model, dist.get_world_size(), example_inputs=given, **constraints)
    errors = errors_of_steps(parallel, alone, case, sizes)
    parallel.eval()
    alone.eval()
    with torch.no_grad():
        given = batch_of(case, *sizes[1], 99)
        errors.append(abs(parallel.loss(**parallel.shard_batch(given)).item() / alone(**given).loss.item() - 1))
    return errors, parallel.engine.variants.count


PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama zero3": ("llama", 2, {"dp": 2, "zero": 3}),
    "llama tp2 sp": ("llama", 2, {"tp": 2, "sp": True}),
    "llama pp2": ("llama", 2, {"pp": 2, "num_microbatches": 2}),
    "t5 dp2 tp2": ("t5", 4, {"dp": 2, "tp": 2}),
    "llama cp2": ("llama", 2, {"cp": 2}),
    "mixtral ep2": ("mixtral", 2, {"ep": 2}),
    "bert dp2 pp2 zb-h1": ("bert", 4, {"dp": 2, "pp": 2, "schedule": "zb-h1", "num_microbatches": 2}),
    "llama zero3 tp2 pp2": ("llama", 8, {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "num_microbatches": 1}),
}
FAST = ("llama zero3",)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PLANS])
def test_steps_of_other_sizes_are_exact(name: str) -> None:
    case, ranks, constraints = PLANS[name]
    for errors, programs in run_ranks(train, ranks, case, SIZES, constraints):
        assert max(errors) < 1e-4, errors
        # Of training that of the plan, one for sizes that divide as the plan's and one for others; two of evaluation.
        assert programs <= 5


def test_the_first_step_may_leave_a_rank_without_rows() -> None:
    for errors, _ in run_ranks(train, 2, "bert", ((1, 7), (8, 16)), {"dp": 2}):
        assert max(errors) < 1e-4, errors


class Sum(nn.Module):
    """A model that has no symbols: it writes the batch into its code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).reshape(len(x), 4).square().mean()


def fixed() -> list[float]:
    torch.manual_seed(0)
    model = Sum()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, 2, example_inputs=torch.ones(8, 4), dp=2)
    errors = []
    for rows in (8, 4, 6):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        errors.append(abs(parallel.step(parallel.shard_batch(x)).item() / alone(x).item() - 1))
    return errors


def test_a_model_without_symbols_is_captured_again() -> None:
    for errors in run_ranks(fixed, 2):
        assert max(errors) < 1e-5


# Rows of the global batch, and the length of each rank's rows.
UNEVEN = ((5, (16, 16)), (3, (9, 9)), (8, (7, 24)), (5, (31, 4)))


def train_unevenly(constraints: dict[str, Any]) -> list[float]:
    """Every rank has the length of its own rows, as a collator gives it that pads to the longest; the others are
    padded for one process, by positions without a label."""
    torch.manual_seed(0)
    model = CASES["llama"].build()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(
        model, dist.get_world_size(), example_inputs=batch_of("llama", 8, 16, 0), **constraints
    )
    errors = []
    for step, (rows, lengths) in enumerate(UNEVEN):
        given = batch_of("llama", rows, max(lengths), step)
        for piece, length in zip(given["labels"].tensor_split(len(lengths)), lengths, strict=True):
            piece[:, length:] = -100
        alone.zero_grad()
        parallel.zero_grad()
        loss = alone(**given).loss
        loss.backward()
        length = lengths[parallel.data_parallel_rank]
        got = parallel.step(**{name: value[:, :length] for name, value in parallel.shard_batch(given).items()})
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        errors += [abs(got.item() / loss.item() - 1), relative(parallel.full_gradients(), expected)]
    return errors


@pytest.mark.parametrize(
    "constraints",
    [
        {"dp": 2, "zero": 3, "num_microbatches": 1},
        pytest.param({"dp": 2, "tp": 2, "num_microbatches": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "pp": 2, "num_microbatches": 1}, marks=pytest.mark.slow),
    ],
)
def test_ranks_may_have_rows_of_other_numbers_and_lengths(constraints: dict[str, Any]) -> None:
    ranks = constraints["dp"] * constraints.get("tp", 1) * constraints.get("pp", 1)
    for errors in run_ranks(train_unevenly, ranks, constraints):
        assert max(errors) < 1e-4, errors


class Mean(nn.Module):
    """A loss that divides by the number of rows, and by another number if ``counted``: of each row the first ones."""

    def __init__(self, *, counted: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x).square()
        if self.counted:
            found = found * torch.arange(x.shape[0], device=x.device)[:, None]
        return found.mean() + F.mse_loss(found, x)


def mean_over_rows(constraints: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = Mean()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, 2, example_inputs=torch.ones(8, 4), **constraints)
    errors = []
    for rows in (5, 1, 8, 3):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        alone.zero_grad()
        parallel.zero_grad()
        loss = alone(x)
        loss.backward()
        errors.append(abs(parallel.step(parallel.shard_batch(x)).item() / loss.item() - 1))
        errors.append(
            relative(parallel.full_gradients(), {n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
        )
    return errors


@pytest.mark.parametrize(
    "constraints",
    [{"dp": 2, "num_microbatches": 2}, pytest.param({"pp": 2, "num_microbatches": 4}, marks=pytest.mark.slow)],
)
def test_a_mean_over_rows_is_that_over_the_rows_of_all(constraints: dict[str, Any]) -> None:
    for errors in run_ranks(mean_over_rows, 2, constraints):
        assert max(errors) < 1e-5, errors


def refused() -> list[str]:
    """What is said where rows are numbered, where ranks with the same rows have others, and where none has any."""
    found = []
    torch.manual_seed(0)
    parallel = autopar.parallelize(Mean(counted=True), 4, example_inputs=torch.ones(8, 4), dp=2, tp=2)
    rows = torch.ones(3 - parallel.data_parallel_rank, 4)
    other = torch.ones(3 + dist.get_rank() % 2, 4)
    for given in (rows, other, torch.ones(0, 4)):
        try:
            parallel.step(given)
        except autopar.AutoparError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_exact_is_refused() -> None:
    for uneven, other, none in run_ranks(refused, 4):
        assert "data-parallel ranks or microbatches have batches of different sizes" in uneven
        assert "rows are counted" in uneven
        assert "torch.arange(x.shape[0]" in uneven
        assert "does not do what the others do; rows of data-parallel rank" in other
        assert "no rows on any rank" in none
