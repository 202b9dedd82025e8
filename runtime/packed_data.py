"""Batches of documents that are packed into rows, dealt out so that every rank has as much work.

A batch is ``input_ids``, ``labels`` and ``position_ids``, as models of transformers take them: positions restart at
each document, by which attention keeps them apart, and the first token of each has no label. Which documents a batch
has depends on the seed, the epoch and the plan's rows, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from autopar.ir.errors import InvalidInput
from autopar.runtime.agreement import agree
from autopar.runtime.data import Dataloader, Seeded, mixed
from autopar.runtime.packing import PackedBatch, Packing

IGNORED = -100


class OwnRows(NamedTuple):
    """Documents of each row of this rank, and how long the rows are."""

    epoch: int
    rows: tuple[tuple[int, ...], ...]
    length: int


class PackedDataloader(Dataloader):
    """This rank's rows of packed global batches. ``state_dict`` counts documents."""

    def __init__(
        self, dataset: Any, packing: Packing, *, multiple: int, lengths: Sequence[int] | None, **options: Any
    ) -> None:
        """multiple: of which rows' lengths are, so that they can be sharded. lengths: of every document, in tokens;
        None to read all of them once. options: those of ``Dataloader``.
        """
        self.packing, self._multiple = packing, multiple
        self._lengths: Sequence[int] = ()
        super().__init__(dataset, packing.rows, ranks=packing.ranks, **options)
        self._lengths = agree(lambda: self._measured(lengths))

    def _measured(self, lengths: Sequence[int] | None) -> Sequence[int]:
        if self.is_stream:
            raise InvalidInput(
                f"{type(self.dataset).__name__} has no length, and documents are packed by number.\n"
                "  try: a dataset with __len__ and __getitem__"
            )
        found = [len(_tokens(self.dataset[n])) for n in range(len(self.dataset))] if lengths is None else list(lengths)
        if len(found) != len(self.dataset):
            raise InvalidInput(f"lengths: {len(found)} of {len(self.dataset)} documents.\n  try: one of each, in order")
        for number, length in enumerate(found):
            if not 0 < length <= self.packing.max_tokens:
                raise InvalidInput(
                    f"document {number} has {length} tokens; expected 1 to max_tokens, {self.packing.max_tokens}.\n"
                    "  try: cut it into several, or a larger max_tokens"
                )
        return found

    def __len__(self) -> int:
        """Batches in this epoch."""
        return sum(1 for _ in self.batches(0))

    def batches(self, start: int) -> Iterator[PackedBatch]:
        """The global batches of this epoch after ``start`` documents."""
        order = self.order()[start:].tolist()
        return self.packing.batches(order, self._lengths, drop_last=self.drop_last)

    def counts(self) -> Iterator[int]:
        return (batch.count for batch in self.batches(self.samples))

    def loader(self) -> DataLoader[Any]:
        """Loads what is left of this epoch."""
        own = []
        for batch in self.batches(self.samples):
            longest = max(sum(self._lengths[n] for n in row) for rank in batch.rows for row in rank)
            own.append(OwnRows(self.epoch, batch.rows[self.rank], -(-longest // self._multiple) * self._multiple))
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch, 1))
        options = {**self.options, "collate_fn": _same, "generator": generator}
        return DataLoader(_Rows(Seeded(self.dataset, self.seed)), batch_size=None, sampler=own, **options)


class _Rows(Dataset[Any]):
    """Packed rows of documents."""

    def __init__(self, documents: Seeded) -> None:
        self._documents = documents

    def __getitem__(self, own: OwnRows) -> dict[str, torch.Tensor]:
        shape = len(own.rows), own.length
        tokens = torch.zeros(shape, dtype=torch.int64)
        labels, positions = torch.full(shape, IGNORED), torch.zeros(shape, dtype=torch.int64)
        for row, documents in enumerate(own.rows):
            start = 0
            for number in documents:
                document = self._documents[own.epoch, number]
                text = _tokens(document)
                part = row, slice(start, start + len(text))
                tokens[part], labels[part] = text, _labels(document, text)
                labels[row, start] = IGNORED
                positions[part] = torch.arange(len(text))
                start += len(text)
            positions[row, start:] = torch.arange(own.length - start)
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def _tokens(document: Any) -> torch.Tensor:
    """The tokens of a document: a sequence of integers, or a mapping with ``input_ids``."""
    found = document["input_ids"] if isinstance(document, Mapping) else document
    return torch.as_tensor(found)


def _labels(document: Any, text: torch.Tensor) -> torch.Tensor:
    """Its labels if it has any, or else its tokens."""
    return torch.as_tensor(document["labels"]) if isinstance(document, Mapping) and "labels" in document else text


def _same(batch: Any) -> Any:
    return batch
