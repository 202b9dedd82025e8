"""The catalogue of devices: published constants with sources, and assumptions with reasons.

A ``Published`` value is a figure somebody printed; an ``Assumed`` value is ours, with the measurement or
argument behind it; a ``Fit`` is a multiple of a constant that was fitted to training runs. Nothing else is in an
entry (``devices/``). A source or reason that starts with "recalled" was written from memory and not checked against the
document it names. ``docs/cost_model.md`` tabulates the entries.
"""

from __future__ import annotations

from difflib import get_close_matches

from autopar.cost_model.devices.amd import AMD
from autopar.cost_model.devices.cpu import CPU
from autopar.cost_model.devices.nvidia import NVIDIA
from autopar.cost_model.hardware.catalogue_entry import GpuEntry
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.fitted_constants import FITTED, Fitted
from autopar.cost_model.stacks.known import AUTOPAR, find_stack
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.errors import InvalidCluster
from autopar.ir.plan import ClusterRef

CATALOGUE: dict[str, GpuEntry] = {entry.name.lower(): entry for entry in (*NVIDIA, *AMD, CPU)}

# Other spellings of the same parts.
_ALIASES = {
    "a100": "a100-80gb",
    "a100-sxm": "a100-80gb",
    "a100-80gb-sxm": "a100-80gb",
    "a100-40gb-sxm": "a100-40gb",
    "a100-sxm-80gb": "a100-80gb",
    "a100-sxm-40gb": "a100-40gb",
    "a100-pcie": "a100-80gb-pcie",
    "a100-pcie-80gb": "a100-80gb-pcie",
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "h100-96gb-hbm2e": "h100-96gb",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "v100-sxm2": "v100",
}


def known_gpus() -> tuple[str, ...]:
    """Names that ``make_cluster`` takes, without the aliases."""
    return tuple(CATALOGUE)


def find_gpu(name: str) -> GpuEntry:
    """The entry called ``name``, in any case. Raises InvalidCluster that lists what there is."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = _ALIASES.get(key, key)
    if key in CATALOGUE:
        return CATALOGUE[key]
    close = get_close_matches(key, [*CATALOGUE, *_ALIASES], n=1, cutoff=0.5)
    hint = f"; did you mean {_ALIASES.get(close[0], close[0])!r}?" if close else ""
    raise InvalidCluster(
        f"unknown GPU {name!r}{hint}\n  known: {', '.join(CATALOGUE)}\n  "
        "try: one of these, or --cluster with a YAML file that gives its figures"
    )


def catalogued_cluster(reference: ClusterRef) -> Cluster:
    """The catalogued cluster that a plan was made for. Raises InvalidCluster."""
    return make_cluster(reference.gpu, reference.num_gpus, reference.gpus_per_node, stack=find_stack(reference.stack))


def make_cluster(
    gpu: str, num_gpus: int, gpus_per_node: int | None = None, *, fitted: Fitted = FITTED, stack: Stack = AUTOPAR
) -> Cluster:
    """``num_gpus`` devices of a catalogued type in the type's usual nodes.

    ``gpus_per_node`` defaults to the usual node, to ``num_gpus`` if that is smaller, and of racks that ``num_gpus`` do
    not fill to an equal share of each, which ``Cluster.shares_nodes_of`` records. fitted: other constants. stack: the
    software that runs on them.
    Raises InvalidCluster for an unknown GPU or counts that do not divide.
    """
    entry = find_gpu(gpu)
    node = int(entry.gpus_per_node.value)
    share = gpus_per_node or entry.share_of_node(num_gpus)
    return Cluster(
        device=entry.device(fitted, stack),
        num_gpus=num_gpus,
        gpus_per_node=share,
        intra_node=entry.intra_node.link(),
        inter_node=entry.inter_node.link(),
        shares_nodes_of=node if gpus_per_node is None and share < min(node, num_gpus) else None,
    )
