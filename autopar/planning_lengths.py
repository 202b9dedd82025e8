"""Steps of a plan on documents of all lengths: batches drawn from a histogram, as the dataloader would make them.

histogram -> documents drawn -> packed or padded batches -> mean documents of a row   -> search
                                                         -> rows of each rank         -> seconds of each step
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean, quantiles
from typing import Any

from torch import nn

from autopar.cost_model.compute.documents import Documents, keeps_documents_apart
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.analysis.token_work import token_work
from autopar.ir.capture.capture import capture
from autopar.ir.capture.other_sizes import captured_at, holds_at, sizes_of_inputs
from autopar.ir.capture.symbols import LENGTH
from autopar.ir.errors import CaptureError, InfeasiblePlan, InvalidInput
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.lengths import LengthHistogram
from autopar.ir.plan import LengthsPrediction, Plan
from autopar.passes.normalise import normalise
from autopar.runtime.packing import Packing
from autopar.search.api import predict_plan
from autopar.search.predict.documents import Batch, Rows, predict_steps
from autopar.search.predict.predict import Predicted
from autopar.search.problem.workload import Workload

# Steps that a prediction is the mean of; fewer where to pack them would take long, by documents times rows.
_STEPS, _FEWEST, _PACKING_WORK = 100, 4, 20_000_000
_SEED = 0
# Documents that are drawn at least.
_SAMPLE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Documents, and how they come in batches.

    packed: into the rows, as ``dataloader(pack=True)`` does; else one a row, each data-parallel rank's padded to its
    longest; None for packed where attention keeps documents apart.
    """

    histogram: LengthHistogram
    packed: bool | None = None

    def packs(self, captured: CapturedModel) -> bool:
        """Whether documents are packed into the rows of ``captured``. Raises InfeasiblePlan if it would mix them."""
        apart = [keeps_documents_apart(node) for node in call_nodes(captured.graph)]
        if self.packed and not any(apart):
            raise InfeasiblePlan(
                f"documents cannot be packed into the rows of {captured.name}: nothing keeps them apart.\n"
                "  expected: attention by position_ids that restart at each document, or by ids of documents\n"
                "  try: example inputs with position_ids, as models of transformers take them; or --pad"
            )
        return any(apart) if self.packed is None else self.packed

    def documents_of(self, captured: CapturedModel) -> Documents | None:
        """Of a row in the mean, padding included; None where they are not packed."""
        if not self.packs(captured):
            return None
        rows = [row for batch in self._packed(captured, ranks=1, multiple=1) for row in batch.rows[0]]
        return Documents.of(rows)

    def batches(self, captured: CapturedModel, plan: Plan) -> list[_Drawn]:
        """Some global batches under a plan for ``captured``."""
        ranks = plan.data_parallel_size
        multiple = 2 * plan.stage_mesh.size // ranks
        made = self._packed if self.packs(captured) else self._padded
        return list(made(captured, ranks=ranks, multiple=multiple))

    def _packed(self, captured: CapturedModel, *, ranks: int, multiple: int) -> Iterator[_Drawn]:
        longest, count = row_length(captured), captured.batch_size
        per_batch = count * longest / fmean(self._pieces(_SAMPLE, longest))
        steps = max(_FEWEST, min(_STEPS, int(_PACKING_WORK / (per_batch * count))))
        lengths = self._pieces(int((steps + 1) * per_batch), longest)
        packing = Packing(count, ranks, longest, token_work(captured).of)
        order = range(len(lengths))
        for number, batch in enumerate(packing.batches(order, lengths, drop_last=True)):
            if number == steps:
                return
            rows = [[[lengths[n] for n in row] for row in own] for own in batch.rows]
            row_tokens = _up(max(sum(row) for own in rows for row in own), multiple)
            yield _Drawn(
                row_tokens * count,
                sum(sum(row) for own in rows for row in own),
                tuple(tuple((*row, *([row_tokens - sum(row)] * (sum(row) < row_tokens))) for row in o) for o in rows),
                (row_tokens,) * ranks,
            )

    def _padded(self, captured: CapturedModel, *, ranks: int, multiple: int) -> Iterator[_Drawn]:
        longest, count = row_length(captured), captured.batch_size
        lengths, each = self._pieces(_STEPS * count, longest), count // ranks
        for start in range(0, _STEPS * count, count):
            own = [lengths[start + rank * each : start + (rank + 1) * each] for rank in range(ranks)]
            padded = tuple(_up(max(part), multiple) for part in own)
            rows = tuple(tuple((length,) for length in part) for part in own)
            yield _Drawn(each * sum(padded), sum(map(sum, own)), rows, padded)

    def _pieces(self, count: int, longest: int) -> list[int]:
        """At least ``count`` lengths in a random order; documents that are longer than a row are cut into several."""
        documents = self.histogram.drawn(_SAMPLE, _SEED)
        pieces = sum(-(-length // longest) for length in documents)
        if pieces < count:
            documents = self.histogram.drawn(-(-count * _SAMPLE // pieces) + _SAMPLE, _SEED)
        found = [min(longest, length - start) for length in documents for start in range(0, length, longest)]
        random.Random(_SEED).shuffle(found)
        return found


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One global batch: tokens that are computed, those of documents, rows of documents by data-parallel rank, and how
    long the rows of each rank are."""

    computed: int
    tokens: int
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[int, ...]

    def microbatches(self, count: int, *, packed: bool) -> Batch:
        """By data-parallel rank, ``count`` for each."""
        found = []
        for own, length in zip(self.rows, self.lengths, strict=True):
            each = len(own) // count
            parts = [own[start : start + each] for start in range(0, len(own), each)]
            found.append([Rows(length, Documents.of(part) if packed else None) for part in parts])
        return found


def predict_lengths(
    plan: Plan,
    dataset: Dataset,
    captured: CapturedModel,
    cluster: Cluster,
    symbolic: Callable[[], CapturedModel],
) -> LengthsPrediction:
    """Steps of a plan for ``captured`` on the documents of a dataset.

    captured: with the longest rows there may be. symbolic: captures it with symbols, in normal form.
    Raises InvalidInput where it is needed for other lengths and holds for one alone.
    """
    packed, drawn = dataset.packs(captured), dataset.batches(captured, plan)
    lengths = _Lengths(captured, symbolic, needed=not packed)

    def at(length: int, documents: Documents | None) -> Predicted:
        workload = lengths.at(length, plan)
        # One document a row runs as documents do, if attention is told of them.
        one = documents or Documents(((length, 1.0),))
        return predict_plan(workload.captured, cluster, plan, workload=workload, documents=one)

    count = plan.batch.num_microbatches
    steps = predict_steps(plan, [lengths.known(batch.microbatches(count, packed=packed)) for batch in drawn], at)
    deciles = quantiles(steps.seconds, n=10, method="inclusive") if len(drawn) > 1 else steps.seconds
    mean, tokens = fmean(steps.seconds), fmean(batch.tokens for batch in drawn)
    return LengthsPrediction(
        packed=packed,
        max_tokens=row_length(captured),
        num_batches=len(drawn),
        step_time_s=mean,
        fast_step_time_s=deciles[0],
        slow_step_time_s=deciles[-1],
        even_step_time_s=steps.even_s,
        document_tokens=tokens,
        computed_tokens=fmean(batch.computed for batch in drawn),
        document_tokens_per_s_per_gpu=tokens / mean / plan.cluster.num_gpus,
    )


def with_lengths(
    plan: Plan,
    dataset: Dataset,
    captured: CapturedModel,
    cluster: Cluster,
    model: nn.Module,
    inputs: Any,
    **options: Any,
) -> Plan:
    """A plan whose prediction has the steps on a dataset. inputs, options: those of ``capture``."""
    assert plan.prediction is not None, "the search predicts what it returns"

    def symbolic() -> CapturedModel:
        return normalise(capture(model, inputs, symbolic=True, **options), check=False)

    found = predict_lengths(plan, dataset, captured, cluster, symbolic)
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"lengths": found})})


class _Lengths:
    """A model with rows of other lengths, each made once."""

    def __init__(self, captured: CapturedModel, symbolic: Callable[[], CapturedModel], *, needed: bool) -> None:
        self._longest = row_length(captured)
        self._captured = captured
        self._made: dict[int, Workload] = {}
        self._symbolic: CapturedModel | None = None
        reason = ""
        try:
            found = symbolic()
            if found.symbols.keys() & {LENGTH} and holds_at(found, sizes_of_inputs(found), captured):
                self._symbolic = found
            else:
                reason = "it does other work at other lengths"
        except CaptureError as error:
            reason = str(error)
        if self._symbolic is None and needed:
            raise InvalidInput(
                f"{captured.name} is captured for rows of {self._longest} tokens alone, and padded rows are of many "
                f"lengths: {reason}\n  try: documents packed into rows (--pack), or no --lengths"
            )

    def at(self, length: int, plan: Plan) -> Workload:
        """The model with rows of a length that ``known`` has let pass."""
        if length not in self._made:
            captured = self._captured
            if length != self._longest:
                assert self._symbolic is not None, "of one length alone"
                captured = captured_at(self._symbolic, {LENGTH: length})
            self._made[length] = Workload.for_plan(captured, plan)
        return self._made[length]

    def known(self, batch: Batch) -> Batch:
        """A batch with rows of lengths that there are captures of."""
        if self._symbolic is not None:
            return batch
        return [[replace(rows, length=self._longest) for rows in rank] for rank in batch]


def row_length(captured: CapturedModel) -> int:
    """Tokens of a row, of the first input of integers. Raises InvalidInput if there is none."""
    for node in captured.graph.nodes:
        if node.name in captured.inputs:
            value = node.meta["val"]
            if not value.is_floating_point() and value.dim() == 2:
                return int(value.shape[1])
    raise InvalidInput(f"{captured.name} reads no rows of tokens, so documents have no lengths.\n  try: no --lengths")


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
