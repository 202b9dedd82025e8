"""The best plan if the network, the memory or the batch were other than they are. Each is a search of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.planning import Planned
from autopar.search.api import estimate_captured, search_captured
from autopar.units import percent

# Factors of the network's speed, of the memory and of the batch.
NETWORKS, MEMORIES, BATCHES = (0.5, 2.0), (0.8, 1.2), (0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """what: in words. plan: the best one, with its prediction; None if there is none, for the ``reason``."""

    what: str
    plan: Plan | None = None
    reason: str = ""


def variations(
    planned: Planned, *, progress: Callable[..., None] = lambda doing, share=None: None
) -> tuple[Variation, ...]:
    """Searched under the constraints of ``planned``. Interrupted by the user it returns those that are done."""
    cases, found = _cases(planned), []
    try:
        for number, (what, cluster, capture) in enumerate(cases):
            progress(f"searching plans for {what}", number / len(cases))
            found.append(_variation(planned, what, cluster, capture))
    except KeyboardInterrupt:
        pass
    return tuple(found)


# What it is, its cluster, and the capture of a model of another batch.
_Case = tuple[str, Cluster, Callable[[], CapturedModel] | None]


def _cases(planned: Planned) -> list[_Case]:
    cluster, batch = planned.result.cluster, planned.captured.batch_size
    cases: list[_Case] = []
    if cluster.num_gpus > 1:
        cases += [(f"a network {speed:g} × as fast", cluster.with_network(speed), None) for speed in NETWORKS]
    for share in MEMORIES:
        words = f"{percent(abs(share - 1))} {'more' if share > 1 else 'less'} memory"
        cases.append((words, cluster.with_memory(int(share * cluster.device.usable_bytes)), None))
    recapture = planned.capture_batch
    if recapture is not None:
        for factor in BATCHES:
            if (size := batch * factor).is_integer():
                cases.append((f"a batch of {size:,.0f}", cluster, partial(recapture, int(size))))
    return cases


def _variation(planned: Planned, what: str, cluster: Cluster, capture: Callable[[], CapturedModel] | None) -> Variation:
    search = estimate_captured if planned.pin_degrees else search_captured
    captured, workload = (planned.captured, planned.result.workload) if capture is None else (capture(), None)
    try:
        plan = search(captured, cluster, planned.constraints, workload=workload).plan
    except AutoparError as error:
        return Variation(what=what, reason=str(error).split("\n", maxsplit=1)[0])
    return Variation(what=what, plan=plan)
