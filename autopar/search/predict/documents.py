"""Seconds of steps whose rows hold documents of different lengths.

    prices   a microbatch whose rows are full of documents of one length, by the lengths of rows and of documents
    rank 0   | F0: 700 + 300 | F1: 900, 100 padding | ...      a microbatch is a mixture of those, by tokens
    rank 1   | F0: 1000      | F1: 5 times 200      | ...      and ranks wait for each other

Prices are those of ``predict``: what does not depend on documents is the same in all of them, and attention is a sum
over documents. Where data-parallel ranks meet in every microbatch, each takes as long as on the slowest of them; where
they do not, the step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

from autopar.cost_model.compute.documents import Documents
from autopar.cost_model.schedule.pipeline_simulator import simulate
from autopar.ir.plan import Plan
from autopar.ir.schedule import Pipelining
from autopar.search.predict.predict import Predicted

Floats = npt.NDArray[np.float64]

# Lengths that are priced: of documents for each doubling, and of rows at most.
_DOCUMENTS = 1.5
_ROWS = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """Those of one microbatch of one data-parallel rank. length: of each, in tokens. documents: of a row, if packed."""

    length: int
    documents: Documents | None = None


# Of each data-parallel rank its microbatches in order.
Batch = Sequence[Sequence[Rows]]


@dataclass(frozen=True, slots=True)
class Steps:
    """seconds: of the step on each batch. even_s: if all microbatches of all ranks were the mean of them."""

    seconds: tuple[float, ...]
    even_s: float


def predict_steps(plan: Plan, batches: Sequence[Batch], at: Callable[[int, Documents | None], Predicted]) -> Steps:
    """Steps of ``plan``. at: the prediction with rows of a length that hold certain documents."""
    every = [rows for batch in batches for rank in batch for rows in rank]
    prices = _Prices(at, every)
    meet = _meet_in_microbatches(plan, prices.largest)
    shape, seconds, total = plan.pipelining, [], np.zeros_like(prices.of(every[0]))
    for batch in batches:
        own = np.array([[prices.of(rows) for rows in rank] for rank in batch])
        total += own.mean((0, 1))
        ranks = own.max(0, keepdims=True) if meet else own
        seconds.append(max(_step_s(shape, rank) for rank in ranks))
    even = np.tile(total / len(batches), (shape.num_microbatches, 1))
    return Steps(tuple(seconds), _step_s(shape, even))


def _meet_in_microbatches(plan: Plan, predicted: Predicted) -> bool:
    """Whether data-parallel ranks wait for each other in every microbatch."""
    gathers = any(plan.zero_of(kind) == 3 for kind in range(len(plan.blocks)))
    return gathers or any(predicted.breakdown_s.get(f"communication_{axis}") for axis in plan.inputs)


class _Prices:
    """Seconds of a microbatch as a vector: of each stage forward, backward, and both passes of that; sends and returns
    of each cut; and of each rank of the pipeline what comes after the last pass."""

    def __init__(self, at: Callable[[int, Documents | None], Predicted], every: Sequence[Rows]) -> None:
        lengths = sorted({rows.length for rows in every})
        documents = [n for rows in every if rows.documents is not None for n, _ in rows.documents.lengths]
        self._rows = _grid(lengths, _ROWS if not documents else 2)
        self._documents: list[int] = []
        if documents:
            low, high = min(documents), max(documents)
            self._documents = _grid(range(low, high + 1), 2 + int(_DOCUMENTS * log2(high / low)))
        self.largest = at(self._rows[-1], None)
        self._table = np.array([[_vector(at(row, one)) for one in self._full_of(row)] for row in self._rows])

    def _full_of(self, row: int) -> list[Documents | None]:
        """Documents of one length in a row, of each length that is priced."""
        return [Documents(((length, row / length),)) for length in self._documents] or [None]

    def of(self, rows: Rows) -> Floats:
        """By the length of the rows and the tokens in documents of each length."""
        at_row = _weights([rows.length], self._rows)[0] @ self._table.transpose(1, 0, 2)
        if rows.documents is None:
            found: Floats = at_row[0]
            return found
        lengths, counts = np.array(rows.documents.lengths).T
        tokens = lengths * counts
        mixed: Floats = (tokens / tokens.sum()) @ _weights(lengths, self._documents) @ at_row
        return mixed


def _vector(predicted: Predicted) -> Floats:
    backward = predicted.backward_s
    inputs, weights = predicted.inputs_s or backward, predicted.weights_s or backward
    costs = predicted.costs
    parts = predicted.forward_s, backward, inputs, weights, costs.sends, costs.returns, predicted.after_s
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def _step_s(shape: Pipelining, microbatches: Floats) -> float:
    """microbatches: the vector of each, on one data-parallel rank."""
    stages, cuts = shape.num_stages, shape.num_stages - 1
    ends = np.cumsum([stages] * 4 + [cuts] * 2)
    forward, backward, inputs, weights, sends, returns, after = np.split(microbatches, ends, axis=1)
    per_stage = [part.T.tolist() for part in (forward, backward, inputs, weights)]
    timeline = simulate(
        shape,
        per_stage[0],
        per_stage[1],
        (per_stage[2], per_stage[3]),
        p2p_forward_s=sends.mean(0).tolist(),
        p2p_backward_s=returns.mean(0).tolist(),
    )
    last = zip(timeline.events, after.mean(0).tolist(), strict=True)
    return float(max((events[-1].end_s if events else 0.0) + rest for events, rest in last))


def _grid(lengths: Sequence[int], most: int) -> list[int]:
    """The first, the last, and some of ``lengths`` between them at equal ratios, ``most`` in all."""
    low, high = lengths[0], lengths[-1]
    wanted = (low * (high / low) ** (step / max(1, most - 1)) for step in range(most))
    return sorted({low, high, *(min(lengths, key=lambda n: abs(n - one)) for one in wanted)})


def _weights(values: Sequence[float] | Floats, grid: Sequence[int]) -> Floats:
    """(values, grid): by how much each value counts as each of the grid, linear between neighbours."""
    return np.stack([np.interp(values, grid, one) for one in np.eye(len(grid))], axis=1)
