"""NVIDIA's parts in their usual nodes."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model.devices.parts import (
    ACCELERATORS,
    DISK_3,
    DISK_4,
    EIGHT,
    HOST_A100,
    HOST_A100_40,
    HOST_H100,
    HOST_V100,
    LAUNCH,
    MAMF,
    MEMORY_EFFICIENCY,
    NETWORK,
    RESERVED,
    by_tile,
    capacity,
    eight_bits,
    fp32,
    half,
    microscaled,
    network,
    tiling,
)
from autopar.cost_model.hardware.catalogue_entry import (
    Assumed,
    Fit,
    GpuEntry,
    HostEntry,
    LinkEntry,
    Published,
)

_TITAN = "Grand Teton H100 of 500 W, HBM2e: pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md @b5bcd76c"
_A100 = "recalled: NVIDIA A100 datasheet"
_H100 = "recalled: NVIDIA H100 datasheet"
_V100 = "recalled: NVIDIA V100 datasheet"
_B200 = "recalled: NVIDIA HGX B200 datasheet"
_B300 = "recalled: NVIDIA HGX B300 datasheet"
_GB200 = "recalled: NVIDIA GB200 NVL72 datasheet"
_GB300 = "recalled: NVIDIA GB300 NVL72 datasheet"
_RECIPES = "NVIDIA/dgxc-benchmarking README.md @v26.06.01"
_OF_80_GB = capacity(79.14, ", the least of six")
_A100_HALF = half(312, ACCELERATORS, 271.2, MAMF)
_A100_TILING = tiling(108, _A100)
_H100_HALF = half(989, ACCELERATORS, 794.5, MAMF)
# Kernels for tiles of 128 are for Hopper: later parts have units for smaller tiles instead.
_H100_EIGHT, _H200_EIGHT = (
    {"fp8": rate, "fp8-block": by_tile(rate)}
    for rate in (eight_bits(1979, ACCELERATORS, best / 1979, MAMF) for best in (1402.6, 1453.4))
)
_H100_TILING = tiling(132, _H100)
_B200_EIGHT = eight_bits(4500, ACCELERATORS, 3432.5 / 4500, MAMF)
_B300_EIGHT = eight_bits(4500, _B300, 3432.5 / 4500, "taken from B200, whose products were measured")
_GB200_EIGHT = eight_bits(5000, _GB200, 3615.6 / 5000, MAMF)
# 1,400 W, of 1,200 W (verda.com/blog/gb300-nvl72-architecture).
_GB300_WATTS = 1400 / 1200
_FROM_GB200 = "taken from GB200, whose products were measured, and raised with its power limit"
_GB300_EIGHT = eight_bits(5000, _GB300, 3615.6 / 5000, _FROM_GB200, watts=_GB300_WATTS)

_NVLINK_BASE = Assumed(15.0, "nccl-tests all_reduce of 128 KiB to 4 MiB on 8 H100: 20-54 us with the hops")
_NVLINK_HOP = Assumed(1.0, "same measurement, over the 14 steps of a ring of 8")


def _nvlink(name: str, gb_s: float, efficiency: float, why: str, switch: Published | None = None) -> LinkEntry:
    return LinkEntry(
        name=name,
        bandwidth_gb_s=Published(gb_s, NETWORK),
        efficiency=Assumed(efficiency, why),
        base_latency_us=_NVLINK_BASE,
        hop_latency_us=_NVLINK_HOP,
        switch_reduce_gb_s=switch,
    )


def _pcie(name: str, gb_s: float, source: str) -> LinkEntry:
    return LinkEntry(
        name=name,
        bandwidth_gb_s=Published(gb_s, source),
        efficiency=Assumed(
            0.60, "a guess, not measured: protocol overhead leaves 0.8; neighbours share host bridges and switches"
        ),
        base_latency_us=_NVLINK_BASE,
        hop_latency_us=Assumed(3.0, "a guess, not measured: through the root complex"),
    )


_IB_A100 = network("HDR InfiniBand", Published(25, "DGX A100: 8 x HDR 200 Gb/s, SC21 Megatron-LM paper"))
_IB_H100 = network("NDR InfiniBand", Published(50, f"DGX H100: 8 x NDR 400 Gb/s, {NETWORK}"))
_NVLINK_A100 = _nvlink("NVLink 3", 300, 0.76, "nccl busbw 229-235 of 300 GB/s at 1-16 GiB, 8 GPUs")
_NVLINK_H100 = _nvlink(
    "NVLink 4",
    450,
    0.80,
    "ring busbw 363-368 of 450 GB/s, 2 to 8 GPUs",
    Published(270, f"NVLS all-reduce: 480 GB/s busbw on 8 GPUs = 274 GB/s of payload, 414 on 5 = 259; {NETWORK}"),
)
_NVLINK_B200 = _nvlink(
    "NVLink 5",
    900,
    0.75,
    "ring busbw 673-682 of 900 GB/s, 4 to 8 GPUs",
    Published(470, f"NVLS all-reduce: 838 GB/s busbw on 8 GPUs = 479 GB/s payload, 778 on 6 = 467; {NETWORK}"),
)

# A rack of NVLink switches is one node; its CPUs reach their GPUs over NVLink too.
_RACK = Published(72, "recalled: NVL72 systems hold 72 GPUs")
_TRAY = Published(4, "recalled: NVIDIA GB200 NVL72 datasheet, 18 compute trays of four GPUs; two may be spare")
_HOST_GRACE = HostEntry(
    link_gb_s=Assumed(225, "recalled: NVIDIA Grace datasheet, NVLink-C2C, 450 GB/s either way, for two GPUs"),
    link_efficiency=Assumed(0.79, "a guess, not measured: as over PCI Express"),
    memory_gb_s=Assumed(256, "recalled: NVIDIA Grace datasheet, 512 GB/s of LPDDR5X for two GPUs"),
    memory_efficiency=Assumed(0.60, "a guess, not measured: AdamW streams seven arrays on the cores of one GPU"),
    memory_gb=Assumed(240, "recalled: NVIDIA Grace datasheet, 480 GB of LPDDR5X for two GPUs"),
)

V100 = GpuEntry(
    name="V100",
    architecture="volta",
    rates={
        "fp32": fp32(15.7, _V100),
        "fp16": half(
            125,
            "bigscience-workshop/bigscience gpt2 experiment notes @9e64ede",
            95,
            "recalled: cuBLAS on V100 reaches 80-95 TFLOP/s on large fp16 matmuls",
            attention=Assumed(0.25, "a guess, not measured: without FlashAttention, the memory-efficient kernel"),
        ),
    },
    memory_gb=capacity(31.73, " (a 16 GB variant exists: give memory_gb in a cluster file)"),
    reserved_gb=RESERVED,
    bandwidth_gb_s=Published(900, _V100),
    memory_efficiency=MEMORY_EFFICIENCY,
    kernel_launch_us=LAUNCH,
    host=HOST_V100,
    disk=DISK_3,
    tiling=tiling(80, _V100),
    gpus_per_node=EIGHT,
    intra_node=_nvlink("NVLink 2", 150, 0.80, "taken from A100, whose rings reach 0.78; no V100 measurement of a node"),
    inter_node=network("EDR InfiniBand", Published(6.25, "DGX-1V: 4 x EDR 100 Gb/s per node, NVIDIA/nccl-tests#29")),
)
A100_40GB = GpuEntry(
    name="A100-40GB",
    architecture="ampere",
    rates={"fp32": fp32(19.5, _A100), "bf16": _A100_HALF},
    memory_gb=capacity(39.38, ", the least of five"),
    reserved_gb=RESERVED,
    bandwidth_gb_s=Published(1555, _A100),
    memory_efficiency=MEMORY_EFFICIENCY,
    kernel_launch_us=LAUNCH,
    host=HOST_A100_40,
    disk=DISK_4,
    tiling=_A100_TILING,
    gpus_per_node=EIGHT,
    intra_node=_NVLINK_A100,
    inter_node=_IB_A100,
)
A100_80GB = replace(
    A100_40GB, name="A100-80GB", memory_gb=_OF_80_GB, bandwidth_gb_s=Published(2039, _A100), host=HOST_A100
)
A100_80GB_PCIE = GpuEntry(
    name="A100-80GB-PCIe",
    architecture="ampere",
    rates={
        "fp32": fp32(19.5, _A100),
        "bf16": half(
            312,
            ACCELERATORS,
            252.9,
            MAMF,
            attention=Fit("sustained", "the SXM part at a lower power limit, as its matmuls", 252.9 / 271.2),
        ),
    },
    memory_gb=_OF_80_GB,
    reserved_gb=RESERVED,
    bandwidth_gb_s=Published(1940, ACCELERATORS),
    memory_efficiency=MEMORY_EFFICIENCY,
    kernel_launch_us=LAUNCH,
    host=HOST_A100,
    disk=DISK_4,
    tiling=_A100_TILING,
    gpus_per_node=Assumed(8, "a guess: common 4U servers hold eight cards"),
    intra_node=_pcie("PCIe 4 x16", 31.5, "recalled: PCI Express 4.0 specification, 16 GT/s x 16 lanes, 128b/130b"),
    inter_node=network("100 Gb/s Ethernet per GPU", Assumed(12.5, "line rate; two 400 Gb/s adapters for eight cards")),
)
H100_SXM = GpuEntry(
    name="H100-SXM",
    architecture="hopper",
    rates={"fp32": fp32(67, _H100), "bf16": _H100_HALF, **_H100_EIGHT},
    memory_gb=_OF_80_GB,
    reserved_gb=RESERVED,
    bandwidth_gb_s=Published(3350, ACCELERATORS),
    memory_efficiency=MEMORY_EFFICIENCY,
    kernel_launch_us=LAUNCH,
    host=HOST_H100,
    disk=DISK_4,
    tiling=_H100_TILING,
    gpus_per_node=EIGHT,
    intra_node=_NVLINK_H100,
    inter_node=_IB_H100,
)
_EIGHT_AT_500 = "1.95 times bf16, as of one product each at 500 W (1,141 and 585 TFLOP/s; pytorch/FBGEMM, PR 2546)"
H100_96GB = replace(
    H100_SXM,
    name="H100-96GB",
    rates={
        "fp32": fp32(67, _H100),
        "bf16": half(989, ACCELERATORS, 794.5, f"{MAMF}, of 700 W", watts=500 / 700),
        **{
            name: replace(rate, efficiency=Fit("sustained", _EIGHT_AT_500, 1141.4 / 585.2 * 794.5 / 1979, 500 / 700))
            for name, rate in _H100_EIGHT.items()
        },
    },
    memory_gb=Assumed(1.2 * _OF_80_GB.value, "what CUDA says of 80 GB, times 96 / 80"),
    bandwidth_gb_s=Published(2400, _TITAN),
)
H100_PCIE = GpuEntry(
    name="H100-PCIe",
    architecture="hopper",
    rates={
        "fp32": fp32(51, _H100),
        "bf16": half(756, ACCELERATORS, 540, "a guess, not measured: SXM at a 350 W limit, as on A100"),
        "fp8": eight_bits(1513, ACCELERATORS),
        "fp8-block": by_tile(eight_bits(1513, ACCELERATORS)),
    },
    memory_gb=_OF_80_GB,
    reserved_gb=RESERVED,
    bandwidth_gb_s=Published(2000, ACCELERATORS),
    memory_efficiency=MEMORY_EFFICIENCY,
    kernel_launch_us=LAUNCH,
    host=HOST_H100,
    disk=DISK_4,
    tiling=tiling(114, "recalled: NVIDIA H100 datasheet"),
    gpus_per_node=Assumed(8, "a guess: common 4U servers hold eight cards"),
    intra_node=_pcie("PCIe 5 x16", 63, "recalled: PCI Express 5.0 specification, 32 GT/s x 16 lanes, 128b/130b"),
    inter_node=network("200 Gb/s per GPU", Assumed(25, "200 Gb/s line rate; four 400 Gb/s adapters for eight cards")),
)
H200 = replace(
    H100_SXM,
    name="H200",
    rates={"fp32": fp32(67, "recalled: NVIDIA H200 datasheet"), "bf16": _H100_HALF, **_H200_EIGHT},
    memory_gb=capacity(139.8),
    bandwidth_gb_s=Published(4800, ACCELERATORS),
)
B200 = GpuEntry(
    name="B200",
    architecture="blackwell",
    rates={
        "fp32": fp32(75, _B200),
        "bf16": half(2250, ACCELERATORS, 1745, MAMF),
        "fp8": _B200_EIGHT,
        **microscaled(4500, 9000, ACCELERATORS, f"{_B200}: 72 PFLOP/s dense on eight", _B200_EIGHT),
    },
    memory_gb=capacity(178.35),
    reserved_gb=RESERVED,
    bandwidth_gb_s=Published(7700, _RECIPES),
    memory_efficiency=MEMORY_EFFICIENCY,
    kernel_launch_us=LAUNCH,
    host=HOST_H100,
    disk=DISK_4,
    tiling=tiling(148, _B200),
    gpus_per_node=EIGHT,
    intra_node=_NVLINK_B200,
    inter_node=network("NDR InfiniBand or EFA v4", Published(50, f"8 x 400 Gb/s, {NETWORK}")),
)
B300 = replace(
    B200,
    name="B300",
    architecture="blackwell-ultra",
    rates={
        "fp32": fp32(75, _B300),
        "bf16": half(2250, ACCELERATORS, 1769, MAMF),
        "fp8": _B300_EIGHT,
        **microscaled(4500, 13500, _B300, f"{_B300}: 108 PFLOP/s dense on eight", _B300_EIGHT),
    },
    memory_gb=Published(270, f"DGX B300; {_RECIPES}"),
    tiling=tiling(148, _B300),
    inter_node=network("XDR InfiniBand or EFA v4", Published(100, f"DGX B300: 8 x 800 Gb/s, {NETWORK}")),
)
GB200 = replace(
    B200,
    name="GB200",
    rates={
        "fp32": fp32(80, _GB200),
        "bf16": half(2500, ACCELERATORS, 1822, MAMF),
        "fp8": _GB200_EIGHT,
        **microscaled(5000, 10000, _GB200, f"{_GB200}: 720 PFLOP/s dense on 72", _GB200_EIGHT),
    },
    memory_gb=capacity(184.31),
    bandwidth_gb_s=Published(8000, ACCELERATORS),
    tiling=tiling(148, _GB200),
    host=_HOST_GRACE,
    gpus_per_node=_RACK,
    gpus_per_tray=_TRAY,
    inter_node=network("NDR InfiniBand", Assumed(50, "recalled: one 400 Gb/s ConnectX-7 for each GPU")),
)
GB300 = replace(
    GB200,
    name="GB300",
    architecture="blackwell-ultra",
    rates={
        "fp32": fp32(80, _GB300),
        "bf16": half(2500, ACCELERATORS, 1822, _FROM_GB200, watts=_GB300_WATTS),
        "fp8": _GB300_EIGHT,
        **microscaled(5000, 15000, _GB300, f"{_GB300}: 1,080 PFLOP/s dense on 72", _GB300_EIGHT),
    },
    memory_gb=capacity(276.5),
    bandwidth_gb_s=Published(8000, _RECIPES),
    inter_node=network("XDR InfiniBand", Assumed(100, "recalled: one 800 Gb/s ConnectX-8 for each GPU")),
)

NVIDIA = (V100, A100_40GB, A100_80GB, A100_80GB_PCIE, H100_SXM, H100_96GB, H100_PCIE, H200, B200, B300, GB200, GB300)
