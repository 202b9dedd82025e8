"""How long the documents of a dataset are: a histogram in a JSON file that a person can read and write.

{"format": 1, "edges": [1, 100, 200, 400], "counts": [10, 30, 5]}        30 documents of 100 to 199 tokens
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from autopar.ir.bounded_text import bad_fields, parse_json, read_text
from autopar.ir.errors import InvalidInput

# Bins for each doubling of the length.
_BINS = 8


class LengthHistogram(BaseModel):
    """Lengths of documents in tokens. counts[i]: documents of edges[i] to edges[i + 1] - 1 tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    edges: tuple[PositiveInt, ...]
    counts: tuple[Annotated[int, Field(ge=0)], ...]

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> LengthHistogram:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"edges: {len(self.edges)} of them around {len(self.counts)} counts; expected one more")
        for number, (low, high) in enumerate(pairwise(self.edges)):
            if high <= low:
                raise ValueError(f"edges.{number + 1}: {high} after {low}; expected rising numbers")
        if not sum(self.counts):
            raise ValueError("counts: there are no documents")
        return self

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthHistogram:
        """The histogram of some lengths, of which there is one. Bins are an eighth of a doubling wide."""
        shortest, longest = min(lengths), max(lengths)
        edges, step = [shortest], 0
        while edges[-1] <= longest:
            edges.append(max(edges[-1] + 1, round(shortest * 2 ** (step / _BINS))))
            step += 1
        counts = [0] * (len(edges) - 1)
        for length in lengths:
            counts[bisect_right(edges, length) - 1] += 1
        return cls(edges=tuple(edges), counts=tuple(counts))

    @classmethod
    def load(cls, path: str | Path) -> LengthHistogram:
        """Read a file. Raises InvalidInput, which names the field that is wrong."""
        data = parse_json(read_text(path, "lengths", InvalidInput), str(path), InvalidInput)
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise InvalidInput(
                f"{path} is no histogram of lengths\n{bad_fields(error, 'the file')}\n  expected what autopar "
                'lengths writes: {"format": 1, "edges": [1, 100, 200], "counts": [10, 30]}'
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_text(self.model_dump_json(indent=None) + "\n", encoding="utf-8")

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return sum(self.counts)

    def quantile(self, share: float) -> int:
        """The length that this share of the documents is at most as long as, to the width of a bin."""
        return self.evenly([share])[0]

    def evenly(self, shares: Sequence[float]) -> list[int]:
        """The lengths at rising shares of the documents; within a bin all lengths are as frequent."""
        ends = list(accumulate(self.counts))
        found = []
        for share in shares:
            place = share * ends[-1]
            number = min(bisect_right(ends, place), len(ends) - 1)
            while not self.counts[number]:  # place is behind the last document
                number -= 1
            low, high = self.edges[number : number + 2]
            inside = (place - ends[number] + self.counts[number]) / self.counts[number]
            found.append(min(high - 1, low + int(inside * (high - low))))
        return found

    def drawn(self, count: int, seed: int) -> list[int]:
        """``count`` lengths, distributed as the documents are, in an order that the seed decides."""
        found = self.evenly([(number + 0.5) / count for number in range(count)])
        random.Random(seed).shuffle(found)
        return found
