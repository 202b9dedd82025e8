"""A pipeline schedule as a dependency graph: every pass runs once, and no ranks wait for each other for ever.

    rank 0   0F0  0F1  0B0  0B1        0F0 -> 1F0            what 1F0 is sent
    rank 1   1F0  1B0  1F1  1B1        1B0 -> 0B0            the gradient that comes back
                                       0F0 -> 0F1            a rank runs one action after the other

An action waits for what it depends on and for the action before it on its rank. A cycle is a deadlock, and is printed.
The last stage runs microbatches forward in order of their numbers: the runtime keeps the losses in the order in which
they are computed, and a backward starts from the loss that is in the place of its microbatch. Any other order of passes
gives the same loss and gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx

from autopar.ir.errors import UnprovenProgram
from autopar.ir.schedule import Action, Pipelining


def verify_schedule(shape: Pipelining, orders: Sequence[Sequence[Action]] | None = None) -> None:
    """Prove that ``orders``, what each rank does in order (those of ``shape`` if not given), run to their end.

    Raises UnprovenProgram: with the actions that are missing, run twice, on the wrong rank or out of order, or with the
    deadlock.
    Linear in the number of actions.
    """
    given = shape.orders() if orders is None else orders
    _check_counts(shape, given)
    _check_losses(shape, given)
    graph = dependencies(given)
    # A topological order is linear; the search for a cycle walks what it has seen again from every action.
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = nx.find_cycle(graph)
    waits = [f"{later} waits for {earlier}: {graph.edges[earlier, later]['reason']}" for earlier, later in cycle]
    raise UnprovenProgram(
        f"the schedule {shape.schedule} of {shape.num_ranks} ranks and {shape.num_microbatches} microbatches stands "
        "still for ever.\n  " + "\n  ".join(waits)
    )


def dependencies(orders: Sequence[Sequence[Action]]) -> nx.DiGraph[Action]:
    """Action -> those that wait for it, with the reason in words."""
    graph: nx.DiGraph[Action] = nx.DiGraph()
    known = {action for order in orders for action in order}
    graph.add_nodes_from(known)
    for rank, order in enumerate(orders):
        for earlier, later in pairwise(order):
            graph.add_edge(earlier, later, reason=f"rank {rank} runs it first")
    for action in known:
        for earlier, reason in _needs(action):
            if earlier in known:
                graph.add_edge(earlier, action, reason=reason)
    return graph


def _needs(action: Action) -> Iterator[tuple[Action, str]]:
    """What an action is made of. A backward of the stage after may be whole or that to its inputs."""
    stage, kind, microbatch = action
    if kind == "F":
        yield Action(stage - 1, "F", microbatch), f"stage {stage - 1} sends its activations"
    elif kind == "W":
        yield Action(stage, "I", microbatch), "it is the rest of that backward"
    else:
        yield Action(stage, "F", microbatch), "it keeps what the backward reads"
        for back in ("B", "I"):
            yield Action(stage + 1, back, microbatch), f"stage {stage + 1} sends the gradient"  # type: ignore[arg-type]


def _check_counts(shape: Pipelining, orders: Sequence[Sequence[Action]]) -> None:
    """Every stage runs every microbatch forward once and backward once, on its rank."""
    if len(orders) != shape.num_ranks:
        raise UnprovenProgram(f"the schedule has orders of {len(orders)} ranks; the pipeline has {shape.num_ranks}")
    counts = Counter(action for order in orders for action in order)
    for rank, order in enumerate(orders):
        for action in order:
            if not 0 <= action.stage < shape.num_stages or shape.rank_of(action.stage) != rank:
                raise UnprovenProgram(f"rank {rank} runs {action}, a stage that it does not hold")
    for stage in range(shape.num_stages):
        for microbatch in range(shape.num_microbatches):
            done = {kind: counts[Action(stage, kind, microbatch)] for kind in ("F", "B", "I", "W")}  # type: ignore[arg-type]
            if done not in ({"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}):
                raise UnprovenProgram(
                    f"stage {stage} runs microbatch {microbatch} as {done}; expected one F, and one B or an I and a W"
                )
    if sum(counts.values()) != sum(counts[a] for a in counts if a.microbatch < shape.num_microbatches):
        raise UnprovenProgram("the schedule runs microbatches that there are not")


def _check_losses(shape: Pipelining, orders: Sequence[Sequence[Action]]) -> None:
    """The losses are computed in order of their microbatches."""
    last = shape.num_stages - 1
    found = [a.microbatch for a in orders[shape.rank_of(last)] if (a.stage, a.kind) == (last, "F")]
    if found != sorted(found):
        raise UnprovenProgram(
            f"stage {last}, the last one, runs microbatches {found} forward in this order; expected {sorted(found)}: "
            "the runtime finds a loss by its place among those computed"
        )
