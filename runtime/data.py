"""Batches of a dataset, of which each data-parallel rank loads its own rows.

The order of the samples depends on the seed and the epoch alone: not on the plan, the number of ranks or of worker
processes. So a run goes on from where it stood under another plan, and every plan sees the batches that one process
would. What a sample's loading draws at random (augmentations) depends on the seed, the epoch and the sample.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from autopar.ir.errors import InvalidInput
from autopar.runtime.agreement import agree, agree_same
from autopar.runtime.inputs import own_rows


class Dataloader:
    """This rank's rows of global batches, epoch after epoch: each ``iter`` goes through what is left of one.

    ``state_dict`` says how many samples the job has had of which epoch; ``load_state_dict`` goes on from there, under
    any plan. A batch counts once it has been handed out, however many workers have loaded ahead.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int,
        ranks: int,
        shuffle: bool | None = None,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        pin_memory: bool = False,
        failed: Callable[[Exception], NoReturn] | None = None,
        agreed: Callable[[str], object] | None = None,
    ) -> None:
        """batch_size: of the global batch. rank, ranks: which of how many runs of its rows this rank gets.

        failed: raises an error of loading, here and on the other ranks. agreed: raises an error unless all ranks call
            it with the same text.

        All ranks of the job call together. Raises InvalidInput on all of them.
        """
        self.dataset, self.batch_size, self.seed, self.drop_last = dataset, batch_size, seed, drop_last
        self._failed, self._agreed = failed, agreed
        self.rank = rank
        self._first, self._rows = own_rows(batch_size, rank, ranks)
        self.options: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
        self._length = _length(dataset)
        self.is_stream = self._length is None
        self.shuffle = not self.is_stream if shuffle is None else shuffle
        agree(lambda: self._check(num_workers))
        agree_same(
            {
                "number of samples": self._length,
                "shuffle": self.shuffle,
                "seed": seed,
                "drop_last": drop_last,
            },
            "dataloader",
        )
        self.epoch = 0
        self.samples = 0

    def _check(self, num_workers: int) -> None:
        kind = type(self.dataset).__name__
        if self.is_stream:
            if not hasattr(self.dataset, "__iter__"):
                raise InvalidInput(
                    f"{kind} has neither a length nor an iterator.\n  expected: samples by number with __len__ and "
                    "__getitem__, or an iterable of samples"
                )
            if self.shuffle:
                raise InvalidInput(
                    f"{kind} has no length, so its samples cannot be shuffled here.\n  try: shuffle=False, and an "
                    "iterable that shuffles by itself, alike on every rank"
                )
            if not self.drop_last:
                raise InvalidInput(
                    f"{kind} has no length, so its last batch cannot be filled up.\n  try: drop_last=True"
                )
            if num_workers > 1:
                raise InvalidInput(
                    f"{kind} has no length: {num_workers} workers would each read all of it, and give every sample "
                    f"{num_workers} times.\n  try: num_workers=1"
                )
        elif not self._length or (self.drop_last and self._length < self.batch_size):
            raise InvalidInput(
                f"{kind} has {self._length} samples, and a global batch has {self.batch_size}: there is no whole batch."
                "\n  try: more samples" + ("" if not self._length else ", or drop_last=False, which repeats some")
            )

    def __len__(self) -> int:
        """Batches in an epoch. TypeError for a dataset without a length."""
        if self._length is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        whole, rest = divmod(self._length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of this epoch; the one after it is next."""
        epoch = self.epoch
        counts = self.counts()
        for batch in self._told(iter(self.loader())):
            self.samples += next(counts)
            place = self.epoch, self.samples
            yield batch
            if (self.epoch, self.samples) != place:
                return  # set_epoch or load_state_dict has been called in between
        self.epoch, self.samples = epoch + 1, 0

    def _told(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; what goes wrong in loading them is raised on every rank."""
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                # Samples without a number may be fewer on one rank.
                if self.is_stream and self._agreed is not None:
                    self._agreed(f"the end of the data of a dataloader, after {self.samples} samples")
                return
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, or stay inside it."""
        if epoch != self.epoch:
            self.epoch, self.samples = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where the data stands, the same on every rank: ``data=`` of ``autopar.save``."""
        return {"epoch": self.epoch, "samples": self.samples, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where another loader of the same dataset stood, whatever its batch size and plan were."""
        if set(state) != {"epoch", "samples", "seed"}:
            raise InvalidInput(f"not the state of a dataloader: {sorted(state)}; expected epoch, samples and seed")
        self.epoch, self.samples, self.seed = state["epoch"], state["samples"], state["seed"]

    def loader(self) -> DataLoader[Any]:
        """Loads what is left of this epoch."""
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch, 1))
        options: dict[str, Any] = {**self.options, "generator": generator}
        if self.is_stream:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
            stream = _OwnRows(self.dataset, self.samples, self._first, self._rows, self.batch_size)
            return DataLoader(stream, batch_size=self._rows, drop_last=True, **options)
        return DataLoader(Seeded(self.dataset, self.seed), batch_sampler=self._batches(), **options)

    def counts(self) -> Iterator[int]:
        """Samples in each batch that is left."""
        return repeat(self.batch_size)

    def order(self) -> torch.Tensor:
        """The numbers of the samples in the order of this epoch."""
        assert self._length is not None
        if not self.shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        return torch.randperm(self._length, generator=generator)

    def _batches(self) -> _Batches:
        """This rank's samples of each batch that is left."""
        order = self.order()
        left = order[self.samples :]
        missing = -len(left) % self.batch_size
        if self.drop_last or not missing:
            left = left[: len(left) // self.batch_size * self.batch_size]
        else:
            left = torch.cat([left, order.repeat(-(-missing // len(order)))[:missing]])
        own = left.view(-1, self.batch_size)[:, self._first : self._first + self._rows]
        return _Batches(own, self.epoch)


class _Batches(Sampler[list[tuple[int, int]]]):
    """Lists of (epoch, sample), out of the numbers of samples, (batches, rows of this rank)."""

    def __init__(self, samples: torch.Tensor, epoch: int) -> None:
        self._samples, self._epoch = samples, epoch

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self._samples:
            yield [(self._epoch, sample) for sample in batch.tolist()]


class Seeded(Dataset[Any]):
    """A dataset whose random numbers depend on the seed, the epoch and the sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            with _seeded(mixed(self._seed, *keys[0])):
                found: list[Any] = self._dataset.__getitems__([sample for _, sample in keys])
                return found
        return [self[key] for key in keys]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        with _seeded(mixed(self._seed, *key)):
            return self._dataset[key[1]]


class _OwnRows(IterableDataset[Any]):
    """A rank's rows of each global batch of a stream that every rank reads whole."""

    def __init__(self, stream: Any, skip: int, first: int, rows: int, batch_size: int) -> None:
        """skip: samples at the start that are not wanted. first, rows: which rows of a batch are."""
        self._stream, self._skip, self._first, self._rows, self._batch_size = stream, skip, first, rows, batch_size

    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        for number, sample in enumerate(self._stream):
            if number < self._skip:
                continue
            batch.append(sample)
            if len(batch) == self._batch_size:
                # Only now: a batch that does not fill is left out on every rank.
                yield from batch[self._first : self._first + self._rows]
                batch.clear()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, the generators of torch (on the CPU), ``random`` and numpy start from ``seed``; then they go on."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def mixed(*numbers: int) -> int:
    """One seed out of several numbers: neighbours give seeds that have nothing in common."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ (number & (2**64 - 1))) + 0x9E3779B97F4A7C15) & (2**64 - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed >> 1


def _length(dataset: Any) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None  # even one with a length has no samples by number
    try:
        return len(dataset) if hasattr(dataset, "__getitem__") else None
    except (TypeError, NotImplementedError):
        return None
