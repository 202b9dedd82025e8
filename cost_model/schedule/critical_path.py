"""The critical path of a simulated step: the longest path through its tasks.

    rank 0   forward ──────────── wait ────────────── backward
                    ╲                                ╱
             send    activations          gradients ╱          the path: forward, activations, forward and backward of
                              ╲          ╱                     rank 1, gradients, backward
    rank 1                     forward backward

An edge leads to a task from each task that had to end before it began, and weighs the seconds that the task itself
took. Every task begins at the moment when the last of those ends, so the longest path is exactly as
long as the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx

from autopar.cost_model.schedule.stream_simulator import Span

# Number of the beginning of a step, which comes before all tasks.
_BEGINNING = 0


def task_graph(spans: Iterable[Span]) -> nx.DiGraph[int]:
    """The tasks of a step by number, with the beginning of the step."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    for span in spans:
        graph.add_weighted_edges_from((before, span.task, span.duration_s) for before in span.after or (_BEGINNING,))
    return graph


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """The tasks that a step waits for, one after another without a gap. Linear in the edges of ``task_graph``."""
    by_number = {span.task: span for span in spans}
    path: list[int] = nx.dag_longest_path(task_graph(spans))
    return [by_number[number] for number in path if number != _BEGINNING]
