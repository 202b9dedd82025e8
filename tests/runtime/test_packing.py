"""Documents are packed so that rows, and ranks, have as much work."""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from autopar.runtime.packed_data import IGNORED, PackedDataloader
from autopar.runtime.packing import Packing
from tests.harness import run_ranks

MAX_TOKENS, ROWS, RANKS = 16384, 16, 4


def log_normal(count: int) -> list[int]:
    """Lengths of documents: half of them below 400 tokens, one in twenty above 2,900."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(count, generator=generator) * 1.2 + 6.0).exp()
    return [min(max(int(length), 1), MAX_TOKENS // 2) for length in lengths]


def work(length: int) -> float:
    """That of pairs of positions alone, which is the hardest to balance."""
    return length**2


def test_ranks_have_as_much_work() -> None:
    lengths = log_normal(6000)
    packing = Packing(ROWS, RANKS, MAX_TOKENS, work)
    batches = list(packing.batches(range(len(lengths)), lengths, drop_last=True))
    even, plain = [], []
    for batch in batches:
        ranks = [sum(packing.work_of(row, lengths) for row in rows) for rows in batch.rows]
        even.append(max(ranks) / mean(ranks))
        documents = sorted(n for rows in batch.rows for row in rows for n in row)
        each = -(-len(documents) // RANKS)
        parts = [documents[start : start + each] for start in range(0, len(documents), each)]
        dealt = [packing.work_of(part, lengths) for part in parts]
        plain.append(max(dealt) / mean(dealt))
    assert mean(even) < 1.1
    assert mean(plain) > 1.4


def test_every_document_is_in_one_batch_and_no_row_is_too_long() -> None:
    lengths = log_normal(900)
    packing = Packing(ROWS, RANKS, MAX_TOKENS, work)
    order = torch.randperm(900, generator=torch.Generator().manual_seed(1)).tolist()
    batches = list(packing.batches(order, lengths, drop_last=False))
    start = 0
    for batch in batches:
        documents = [n for rows in batch.rows for row in rows for n in row]
        assert sorted(documents) == sorted(order[start : start + batch.count])
        assert [len(rows) for rows in batch.rows] == [ROWS // RANKS] * RANKS
        assert all(sum(lengths[n] for n in row) <= MAX_TOKENS for rows in batch.rows for row in rows)
        start += batch.count
    assert start == 900
    filled = [sum(lengths[n] for rows in b.rows for row in rows for n in row) for b in batches[:-1]]
    assert min(filled) > 0.8 * ROWS * MAX_TOKENS


class Documents:
    """Document n has n % 7 + 1 tokens, all n."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((number % 7 + 1,), number)}


def loader(ranks: int, rank: int, **options: object) -> PackedDataloader:
    packing = Packing(4, ranks, 10, work)
    return PackedDataloader(Documents(), packing, rank=rank, multiple=4, lengths=None, seed=3, **options)


def contents(batch: dict[str, Tensor]) -> list[list[int]]:
    """The documents in each row."""
    found = []
    for tokens, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        found.append([int(tokens[start]) for start in starts])
    return found


def rows_of_documents() -> list[dict[str, Tensor]]:
    return list(loader(1, 0))


def test_rows_are_documents_one_after_the_other() -> None:
    (batches,) = run_ranks(rows_of_documents, 1)
    assert batches
    for batch in batches:
        tokens, labels, positions = (batch[name] for name in ("input_ids", "labels", "position_ids"))
        assert tokens.shape == labels.shape == positions.shape
        assert tokens.shape[0] == 4
        assert tokens.shape[1] % 4 == 0
        told = labels != IGNORED
        assert torch.equal(labels[told], tokens[told])
        assert bool((labels[positions == 0] == IGNORED).all())
        for row in range(4):
            for number in set(tokens[row][told[row]].tolist()):
                assert int((told[row] & (tokens[row] == number)).sum()) == number % 7


def resumed() -> dict[int, bool]:
    """Whether a run that stops after two batches goes on with the others, by the number of ranks."""
    whole = [sorted(n for row in contents(batch) for n in row if n) for batch in loader(1, 0)]
    found = {}
    for ranks in (1, 2, 4):
        first = loader(1, 0)
        stream = iter(first)
        next(stream), next(stream)
        state = first.state_dict()
        parts = []
        for rank in range(ranks):
            own = loader(ranks, rank)
            own.load_state_dict(state)
            parts.append([[n for row in contents(batch) for n in row if n] for batch in own])
        steps = [sorted(n for part in step for n in part) for step in zip(*parts, strict=True)]
        found[ranks] = steps == whole[2:] and len(first) == len(whole) > 3
    return found


def test_a_run_goes_on_where_it_stood_on_any_number_of_ranks() -> None:
    assert run_ranks(resumed, 1) == [{1: True, 2: True, 4: True}]
