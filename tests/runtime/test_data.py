"""Which rows a data-parallel rank gets, and that they do not depend on how many there are, workers or restarts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset, IterableDataset

from autopar.ir.errors import InvalidInput
from autopar.runtime.data import Dataloader


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Squares(Dataset[Tensor]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor(number)


class Noisy(Squares):
    """Augmented: each sample is drawn anew in each epoch."""

    def __getitem__(self, number: int) -> Tensor:
        return number + torch.rand(()) + random.random()


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(22))


def _loader(dataset: Any = None, batch_size: int = 4, rank: int = 0, ranks: int = 1, **rest: Any) -> Dataloader:
    return Dataloader(Squares() if dataset is None else dataset, batch_size, rank=rank, ranks=ranks, **rest)


def _epoch(loader: Dataloader) -> list[list[float]]:
    return [batch.tolist() for batch in loader]


def _joined(loaders: list[Dataloader]) -> list[list[float]]:
    return [list(chain.from_iterable(parts)) for parts in zip(*map(_epoch, loaders), strict=True)]


@pytest.mark.parametrize("dataset", [Squares(), Noisy()])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_global_batches(dataset: Any, ranks: int) -> None:
    whole = _loader(dataset, seed=3)
    parts = [_loader(dataset, rank=rank, ranks=ranks, seed=3) for rank in range(ranks)]
    for _ in range(3):
        expected = _epoch(whole)
        assert len(expected) == len(whole) == 5
        assert _joined(parts) == expected


def test_every_epoch_has_another_order() -> None:
    loader = _loader()
    first, second = _epoch(loader), _epoch(loader)
    assert first != second
    assert len({number for batch in first for number in batch}) == 20
    loader.set_epoch(0)
    assert _epoch(loader) == first
    assert _epoch(_loader(seed=1)) != first
    assert _epoch(_loader(shuffle=False)) == torch.arange(20).view(5, 4).tolist()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(num_workers: int) -> None:
    alone, helped = _loader(Noisy()), _loader(Noisy(), num_workers=num_workers)
    assert [_epoch(helped) for _ in range(2)] == [_epoch(alone) for _ in range(2)]


def test_own_generators_go_on_as_before() -> None:
    states = random.getstate(), torch.get_rng_state()
    _epoch(_loader(Noisy()))
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize(("batch_size", "ranks"), [(4, 1), (4, 2), (2, 1), (6, 3)])
@pytest.mark.parametrize("dataset", [Noisy(), Stream()])
def test_a_run_goes_on_under_another_plan(dataset: Any, batch_size: int, ranks: int) -> None:
    before = _loader(dataset, num_workers=1)
    batches = iter(before)
    seen = [next(batches) for _ in range(2)]
    assert sum(map(len, seen)) == 8
    state = before.state_dict()
    assert state == {"epoch": 0, "samples": 8, "seed": 0}
    whole = list(chain.from_iterable(_epoch(_loader(dataset, batch_size=2))))
    after = [_loader(dataset, batch_size, rank=rank, ranks=ranks, seed=7) for rank in range(ranks)]
    for loader in after:
        loader.load_state_dict(state)
    rest = list(chain.from_iterable(_joined(after)))
    assert rest == whole[8 : 8 + len(rest)] and len(whole) - 8 - len(rest) < batch_size
    assert {loader.epoch for loader in after} == {1}


def test_the_last_batch_can_be_filled_up() -> None:
    loader = _loader(drop_last=False)
    epoch = _epoch(loader)
    assert len(epoch) == len(loader) == 6
    assert epoch[-1][2:] == epoch[0][:2]
    assert {number for batch in epoch for number in batch} == set(range(22))
    assert len(_epoch(_loader(batch_size=64, drop_last=False))[0]) == 64


def test_streams() -> None:
    parts = [_loader(Stream(), rank=rank, ranks=2) for rank in range(2)]
    assert _joined(parts) == torch.arange(20).view(5, 4).tolist()
    with pytest.raises(TypeError):
        len(parts[0])


def test_batches_are_collated_from_own_rows() -> None:
    loader = _loader(rank=1, ranks=2, shuffle=False, collate_fn=lambda rows: {"sum": sum(rows)})
    assert [int(batch["sum"]) for batch in loader] == [5, 13, 21, 29, 37]


REFUSED = {
    "22 samples, and a global batch has 32": {"batch_size": 32},
    "neither a length nor an iterator": {"dataset": object()},
    "cannot be shuffled": {"dataset": Stream(), "shuffle": True},
    "cannot be filled up": {"dataset": Stream(), "drop_last": False},
    "2 times": {"dataset": Stream(), "num_workers": 2},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        _loader(**REFUSED[words])


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not the state of a dataloader"):
        _loader().load_state_dict({"step": 3})
