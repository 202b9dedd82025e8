"""What the ranks of a job really send in a training step, against the records of its placed model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isclose

import torch.distributed as dist

import autopar
from autopar.checking.recorded import Sent, differences, expected_of
from autopar.ir.placed.placed_model import place_captured
from autopar.ir.placed.step_communication import step_communication
from autopar.ir.plan import Plan
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.ir.torch_private import process_group


@contextmanager
def compared(parallel: autopar.ParallelModule, found: list[str], plan: Plan | None = None) -> Iterator[None]:
    """Within it all ranks make one training step; ``found`` then says where it differs from the records, on any rank.

    Not the first step, in which buckets of gradients are laid out. A step in eval mode runs another capture, and is not
    compared. plan: that is recorded, if not that of ``parallel``.
    """
    if not parallel.training:
        yield
        return
    placed = place_captured(parallel.engine.captured, plan or parallel.plan)
    records = step_communication(placed)
    with CollectiveCounter() as counter:
        yield
    agreement = parallel.engine.accord.group_name
    sent = []
    for one in counter.select():
        ranks = tuple(sorted(dist.get_process_group_ranks(process_group(one.group))))
        if one.kind == "recv" or one.group == agreement or len(ranks) == 1:
            continue
        if one.peer is not None:
            ranks = (dist.get_global_rank(process_group(one.group), one.peer),)
        sent.append(Sent(one.kind, one.phase, ranks, float(one.payload_bytes)))
    expected = expected_of(placed, records, dist.get_rank(), phases=True)
    own, num_bytes = differences(expected, sent)
    every: list[tuple[list[str], float, float]] = [([], 0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(every, (own, num_bytes, expected.dispatched_bytes))
    found += [f"rank {rank}: {text}" for rank, (texts, _, _) in enumerate(every) for text in texts]
    total, goal = sum(sent for _, sent, _ in every), sum(wanted for _, _, wanted in every)
    # Experts with a capacity drop what is beyond it, so that less may travel.
    capped = parallel.plan.expert_capacity is not None
    if total > goal * 1.0001 if capped else not isclose(total, goal, rel_tol=1e-6):
        found.append(f"dispatch of tokens, all ranks: recorded {goal} bytes, issued {total}")
