"""Plans for fewer ranks than the job was started with, searched before they are needed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.helper import Helper
from autopar.ir.capture.capture import capture
from autopar.ir.errors import AutoparError, InvalidCluster
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.local_cluster import local_cluster
from autopar.passes.normalise import normalise
from autopar.planning_rows import search_rows
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from autopar.supervision.forked import die_with
from autopar.training.job import OpenedJob

# Training comes first.
_NICENESS = 10


class FewerRanks:
    """Plans by their number of ranks: for the same model, global batch and precision."""

    def __init__(self, opened: OpenedJob) -> None:
        self._opened, self._supervisor = opened, os.getpid()
        self._captured: dict[int, CapturedModel] = {}
        """By the rows of a step."""
        self._known: dict[int, str | None] = {}
        self._helper: Helper | None = None
        self._asked: list[int] = []
        """Sizes that the helper was sent and has not answered, in its order."""
        self.searched_s = 0.0
        """Seconds that the last call of ``plan`` searched, for what had not been searched ahead."""

    def ahead(self, sizes: Iterable[int]) -> None:
        """Search for these in a process beside this one."""
        for size in dict.fromkeys(sizes):
            if not 0 < size < self._opened.plan.num_ranks or size in self._known or size in self._asked:
                continue
            if self._helper is None:
                self._helper = Helper(self._search_beside)
            self._helper.send(size)
            self._asked.append(size)

    def collect(self) -> None:
        """Take what has been found meanwhile."""
        try:
            while self._helper is not None and self._asked and self._helper.has_answered():
                self._known[self._asked[0]] = self._helper.receive()
                self._asked.pop(0)
        except (EOFError, OSError):  # it has ended; the sizes are searched for when they are needed
            self.stop()
        if not self._asked:
            self.stop()

    def stop(self) -> None:
        """Search no more."""
        self._asked = []
        if self._helper is not None:
            self._helper.stop()
            self._helper = None

    def plan(self, room: int) -> tuple[int, str] | None:
        """The most ranks, at most ``room``, that there is a plan for, and its text."""
        self.collect()
        self.searched_s = 0.0
        for size in range(room, 0, -1):
            if size not in self._known:
                start = time.monotonic()
                self._known[size] = self._search(size)
                self.searched_s += time.monotonic() - start
            text = self._known[size]
            if text is not None:
                return size, text
        return None

    def _search_beside(self, size: int) -> str | None:
        if not self._captured:  # the first call in this process
            die_with(self._supervisor, "autopar search")
            os.nice(_NICENESS)
        return self._search(size)

    def _search(self, size: int) -> str | None:
        """The text of the best plan for so many ranks; None if nothing fits."""
        plan = self._opened.plan
        recipes = dict.fromkeys(recipe for block in plan.blocks for recipe in block.recipes.values())
        constraints = Constraints(
            precision=plan.precision, recipes=tuple(recipes) or (None,), expert_capacity=plan.expert_capacity
        )
        cluster, batch = cluster_like(plan, size), plan.batch.global_size
        try:
            found = search_rows(
                batch,
                cluster.num_gpus,
                constraints,
                search=lambda rows, limits: search_captured(self._captured_with(rows), cluster, limits, samples=batch),
                symbolic=lambda: self._capture(batch, symbolic=True),
            )
        except AutoparError:
            return None
        return found.plan.model_copy(update={"model": plan.model}).to_yaml()

    def _captured_with(self, rows: int) -> CapturedModel:
        if rows not in self._captured:
            self._captured[rows] = self._capture(rows)
        return self._captured[rows]

    def _capture(self, rows: int, *, symbolic: bool = False) -> CapturedModel:
        source = self._opened.source
        inputs = source.meta_inputs(rows, self._opened.seq_len)
        return normalise(capture(source.meta_model(), inputs, name=source.name, symbolic=symbolic), check=not symbolic)


def cluster_like(plan: Plan, size: int) -> Cluster:
    """So many devices of the kind that a plan is for, on nodes of at most as many as it says."""
    per_node = max(n for n in range(1, min(plan.cluster.gpus_per_node, size) + 1) if size % n == 0)
    try:
        return make_cluster(plan.cluster.gpu, size, per_node)
    except InvalidCluster:
        return local_cluster(size, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
