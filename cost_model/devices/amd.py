"""AMD's parts in their usual nodes."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model.devices.parts import (
    ACCELERATORS,
    DISK_4,
    EIGHT,
    HOST_H100,
    MAMF,
    NETWORK,
    RESERVED,
    capacity,
    eight_bits,
    fp32,
    half,
    network,
    tiling,
)
from autopar.cost_model.hardware.catalogue_entry import Assumed, GpuEntry, LinkEntry, Published

_MI300X = "recalled: AMD Instinct MI300X datasheet"
_MI355X = "recalled: AMD Instinct MI355X datasheet"


def _xgmi(all_peers_gb_s: float, one_peer_gb_s: float, why: str) -> LinkEntry:
    """All links of a device together, and the one to a peer."""
    return LinkEntry(
        name="Infinity Fabric",
        bandwidth_gb_s=Published(all_peers_gb_s, NETWORK),
        efficiency=Assumed(0.70, why),
        base_latency_us=Assumed(25.0, "a guess, not measured: RCCL as NCCL with slower launches"),
        hop_latency_us=Assumed(2.0, "a guess, not measured: RCCL as NCCL"),
        peer_gb_s=Published(one_peer_gb_s, f"one xGMI link per pair, {NETWORK}"),
    )


_XGMI_448 = _xgmi(448, 64, "MI300X: busbw 313 of 448 GB/s on 8 GPUs, 48 of 64 on 2")
_ATTENTION = Assumed(0.25, "recalled: ROCm FlashAttention-2 runs at about 300 TFLOP/s on MI300X")

MI300X = GpuEntry(
    name="MI300X",
    architecture="cdna",
    rates={
        "fp32": fp32(163.4, _MI300X),
        "bf16": half(1307, ACCELERATORS, 668.4, MAMF, attention=_ATTENTION),
    },
    memory_gb=capacity(191.69, ", the lesser of two"),
    reserved_gb=RESERVED,
    bandwidth_gb_s=Published(5300, ACCELERATORS),
    memory_efficiency=Assumed(0.75, "recalled: stream-like kernels reach 4.0-4.3 of 5.3 TB/s"),
    kernel_launch_us=Assumed(6.0, "a guess, not measured: HIP launches are slower than CUDA's"),
    host=HOST_H100,
    disk=DISK_4,
    tiling=tiling(304, _MI300X),
    gpus_per_node=EIGHT,
    intra_node=_XGMI_448,
    inter_node=network("400 Gb/s per GPU", Assumed(50, "recalled: eight 400 Gb/s adapters for eight GPUs")),
)
MI325X = replace(
    MI300X,
    name="MI325X",
    rates={
        "fp32": fp32(163.4, "recalled: AMD Instinct MI325X datasheet"),
        "bf16": half(1307, ACCELERATORS, 784.9, MAMF, attention=_ATTENTION),
    },
    memory_gb=Published(256, ACCELERATORS),
    bandwidth_gb_s=Published(6000, ACCELERATORS),
)
MI355X = replace(
    MI300X,
    name="MI355X",
    rates={
        "fp32": fp32(157.3, _MI355X),
        "bf16": half(2500, ACCELERATORS, 1565, MAMF, attention=_ATTENTION),
        "fp8": eight_bits(5000, _MI355X),
    },
    memory_gb=Published(288, ACCELERATORS),
    bandwidth_gb_s=Published(8000, ACCELERATORS),
    tiling=tiling(256, _MI355X),
    intra_node=_xgmi(535.5, 76.5, "taken from MI300X, whose rings were measured"),
)

AMD = (MI300X, MI325X, MI355X)
