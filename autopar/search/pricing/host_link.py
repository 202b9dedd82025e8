"""The link between a device and its host: what the activations of a block take of it beside offloaded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.cost_model.communication.gradient_sync import SyncTime, offload_time
from autopar.cost_model.communication.host_copies import HostCopies, added_by_copies, link_seconds
from autopar.cost_model.compute.op_time import ZERO, OpTime
from autopar.cost_model.hardware.device import Device
from autopar.search.pricing.kept_graph import KeptCost
from autopar.search.pricing.parameter_price import ParameterPrice, by_zero_stage
from autopar.search.pricing.pricing import Pricing


def host_copies(kept: KeptCost, device: Device, computed: OpTime, taken: OpTime) -> HostCopies:
    """The copies of a set of tensors that a block keeps. computed: seconds of the block. taken: see ``link_taken``."""
    added = added_by_copies(kept.host_bytes, device, computed, taken)
    return HostCopies(num_bytes=kept.host_bytes, input_bytes=kept.input_bytes, added=added)


def link_taken(pricing: Pricing, held: Sequence[ParameterPrice]) -> OpTime:
    """Seconds a microbatch in which offloaded parameters of a block, and their gradients, take the link."""
    if not pricing.offload:
        return ZERO
    offloaded = SyncTime()
    for (zero, reshard, axes), own in by_zero_stage(held).items():
        shards = prod(pricing.mesh.axes[axis].size for axis in axes)
        device = pricing.ops.cluster.device
        offloaded += offload_time(own.numel / shards, device, zero=zero, reshard=reshard, trained=own.trained)
    return link_seconds(offloaded, pricing.num_microbatches)
