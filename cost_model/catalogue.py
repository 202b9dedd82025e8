"""The catalogue of GPUs: published constants with sources, and assumptions with reasons.

A ``Published`` value is a figure somebody printed; an ``Assumed`` value is ours, with the measurement or
argument behind it; a ``Fit`` is a multiple of a constant that was fitted to training runs. Nothing else is in an
entry. A source or reason that starts with "recalled" was written from memory and not checked against the document it
names. ``docs/cost_model.md`` tabulates the entries.
"""

from __future__ import annotations

from difflib import get_close_matches

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.entries import (
    Assumed,
    Fit,
    GpuEntry,
    HostEntry,
    LinkEntry,
    Published,
    RateEntry,
    TilingEntry,
)
from autopar.cost_model.fitted import FITTED, Fitted
from autopar.cost_model.matmul import Tile
from autopar.ir.errors import InvalidCluster

# Pages that several entries quote.
_ACCELERATORS = "stas00/ml-engineering compute/accelerator/README.md @744d01e"
_NETWORK = "stas00/ml-engineering network/README.md @744d01e"
_TITAN = "Grand Teton H100 of 500 W, HBM2e: pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md @b5bcd76c"
_A100 = "recalled: NVIDIA A100 datasheet"
_H100 = "recalled: NVIDIA H100 datasheet"
_V100 = "recalled: NVIDIA V100 datasheet"
_B200 = "recalled: NVIDIA HGX B200 datasheet"
_MI300X = "recalled: AMD Instinct MI300X datasheet"

_RESERVED = Assumed(
    1.5, "a guess: CUDA context, NCCL channels, cuBLAS workspaces; marketed GB are decimal, parts have up to 7 % more"
)
_MEMORY_EFFICIENCY = Fit("memory", "large elementwise kernels reach 80-90 % of HBM bandwidth (recalled)")
_LAUNCH = Fit("launch_us", "kernels are queued ahead, yet each costs some microseconds of tail and gap")
_TILES = (Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.92), Tile(128, 64, 0.8), Tile(64, 64, 0.65))
_EIGHT = Published(8, "recalled: DGX and HGX systems hold eight GPUs")


def _fp32(tflops: float, source: str) -> RateEntry:
    return RateEntry(
        peak_tflops=Published(tflops, source),
        efficiency=Assumed(
            0.85, "a guess, not measured: cuBLAS SGEMM without TF32, which PyTorch leaves off, runs near its peak"
        ),
        attention=Assumed(
            0.35, "a guess, not measured: the memory-efficient kernel serves fp32, FlashAttention does not"
        ),
    )


def _half(tflops: float, source: str, best_tflops: float, why: str, attention: Assumed | Fit) -> RateEntry:
    """best_tflops: the highest rate measured on any shape."""
    return RateEntry(
        peak_tflops=Published(tflops, source),
        efficiency=Fit("matmul", why, best_tflops / tflops),
        attention=attention,
    )


def _tiling(units: int, source: str) -> TilingEntry:
    return TilingEntry(
        tiles=_TILES,
        why_tiles="a guess, not measured: the tiles that libraries have; smaller ones read more for what they compute",
        units=Published(units, source),
        half_depth=Fit("half_depth", "set-up and write-out of a tile, as steps along its depth"),
    )


_MAMF = "best shape of the MAMF finder, " + _ACCELERATORS
_A100_ATTENTION = Fit("attention_ampere", "the share of FlashAttention-2, and of older kernels, in training runs")
_A100_HALF = _half(312, _ACCELERATORS, 271.2, _MAMF, _A100_ATTENTION)
_A100_TILING = _tiling(108, _A100)
_H100_ATTENTION = Fit("attention_hopper", "FlashAttention-2, the kernel PyTorch ships, in training runs")
_H100_HALF = _half(989, _ACCELERATORS, 794.5, _MAMF, _H100_ATTENTION)
_H100_TILING = _tiling(132, _H100)

_NVLINK_BASE = Assumed(15.0, "nccl-tests all_reduce of 128 KiB to 4 MiB on 8 H100: 20-54 us with the hops")
_NVLINK_HOP = Assumed(1.0, "same measurement, over the 14 steps of a ring of 8")


def _nvlink(name: str, gb_s: float, efficiency: float, why: str, switch: Published | None = None) -> LinkEntry:
    return LinkEntry(
        name=name,
        bandwidth_gb_s=Published(gb_s, _NETWORK),
        efficiency=Assumed(efficiency, why),
        base_latency_us=_NVLINK_BASE,
        hop_latency_us=_NVLINK_HOP,
        switch_reduce_gb_s=switch,
    )


def _network(name: str, bandwidth_gb_s: Published | Assumed) -> LinkEntry:
    return LinkEntry(
        name=name,
        bandwidth_gb_s=bandwidth_gb_s,
        efficiency=Assumed(0.90, "busbw 192 of 200 GB/s (DGX A100), 382 of 400 (B200 EFA), 350 of 400 (248 nodes)"),
        base_latency_us=Assumed(
            25.0, "a guess, not measured: as within a node, plus the proxy thread that drives the NIC"
        ),
        hop_latency_us=Assumed(5.0, "B200 EFA: 1 MiB on 32 GPUs takes 380 us in 62 ring steps; InfiniBand less"),
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


def _host(generation: int, link_gb_s: float, memory_gb_s: float, memory: str) -> HostEntry:
    return HostEntry(
        link_gb_s=Published(link_gb_s, f"recalled: PCI Express {generation}.0 specification, 16 lanes, 128b/130b"),
        link_efficiency=Assumed(
            0.79, "nvbandwidth on 8 A100: 24.8 of 31.5 GB/s either way (forums.developer.nvidia.com/t/352186)"
        ),
        memory_gb_s=Assumed(memory_gb_s, f"recalled: {memory}, divided among eight GPUs"),
        memory_efficiency=Assumed(0.60, "a guess, not measured: AdamW streams seven arrays on the cores of one GPU"),
    )


_HOST_V100 = _host(3, 15.75, 32, "2 Xeon of 6 channels DDR4-2666 (DGX-2)")
_HOST_A100 = _host(4, 31.5, 51, "2 EPYC 7742 of 8 channels DDR4-3200 (DGX A100)")
_HOST_H100 = _host(5, 63, 77, "2 Xeon 8480C of 8 channels DDR5-4800 (DGX H100)")

_IB_A100 = _network("HDR InfiniBand", Published(25, "DGX A100: 8 x HDR 200 Gb/s, SC21 Megatron-LM paper"))
_IB_H100 = _network("NDR InfiniBand", Published(50, f"DGX H100: 8 x NDR 400 Gb/s, {_NETWORK}"))
_NVLINK_A100 = _nvlink("NVLink 3", 300, 0.76, "nccl busbw 229-235 of 300 GB/s at 1-16 GiB, 8 GPUs")
_NVLINK_H100 = _nvlink(
    "NVLink 4",
    450,
    0.80,
    "ring busbw 363-368 of 450 GB/s, 2 to 8 GPUs",
    Published(270, f"NVLS all-reduce: 480 GB/s busbw on 8 GPUs = 274 GB/s of payload, 414 on 5 = 259; {_NETWORK}"),
)

_ENTRIES = (
    GpuEntry(
        name="V100",
        rates={
            "fp32": _fp32(15.7, _V100),
            "fp16": _half(
                125,
                "bigscience-workshop/bigscience gpt2 experiment notes @9e64ede",
                95,
                "recalled: cuBLAS on V100 reaches 80-95 TFLOP/s on large fp16 matmuls",
                Assumed(0.25, "a guess, not measured: no FlashAttention on V100, but the memory-efficient kernel"),
            ),
        },
        memory_gb=Published(32, f"{_V100} (a 16 GB variant exists: give memory_gb in a cluster file)"),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(900, _V100),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_V100,
        tiling=_tiling(80, _V100),
        gpus_per_node=_EIGHT,
        intra_node=_nvlink(
            "NVLink 2", 150, 0.80, "taken from A100, whose rings reach 0.78; no V100 measurement of a node"
        ),
        inter_node=_network(
            "EDR InfiniBand", Published(6.25, "DGX-1V: 4 x EDR 100 Gb/s per node, NVIDIA/nccl-tests#29")
        ),
    ),
    GpuEntry(
        name="A100-40GB",
        rates={"fp32": _fp32(19.5, _A100), "bf16": _A100_HALF},
        memory_gb=Published(40, _A100),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(1555, _A100),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_A100,
        tiling=_A100_TILING,
        gpus_per_node=_EIGHT,
        intra_node=_NVLINK_A100,
        inter_node=_IB_A100,
    ),
    GpuEntry(
        name="A100-80GB",
        rates={"fp32": _fp32(19.5, _A100), "bf16": _A100_HALF},
        memory_gb=Published(80, _ACCELERATORS),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(2039, _A100),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_A100,
        tiling=_A100_TILING,
        gpus_per_node=_EIGHT,
        intra_node=_NVLINK_A100,
        inter_node=_IB_A100,
    ),
    GpuEntry(
        name="A100-80GB-PCIe",
        rates={
            "fp32": _fp32(19.5, _A100),
            "bf16": _half(
                312,
                _ACCELERATORS,
                252.9,
                _MAMF,
                Fit("attention_ampere", "the SXM part at a lower power limit, as its matmuls", 252.9 / 271.2),
            ),
        },
        memory_gb=Published(80, _ACCELERATORS),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(1940, _ACCELERATORS),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_A100,
        tiling=_A100_TILING,
        gpus_per_node=Assumed(8, "a guess: common 4U servers hold eight cards"),
        intra_node=_pcie("PCIe 4 x16", 31.5, "recalled: PCI Express 4.0 specification, 16 GT/s x 16 lanes, 128b/130b"),
        inter_node=_network(
            "100 Gb/s Ethernet per GPU", Assumed(12.5, "line rate; two 400 Gb/s adapters for eight cards")
        ),
    ),
    GpuEntry(
        name="H100-SXM",
        rates={"fp32": _fp32(67, _H100), "bf16": _H100_HALF},
        memory_gb=Published(80, _ACCELERATORS),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(3350, _ACCELERATORS),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_H100,
        tiling=_H100_TILING,
        gpus_per_node=_EIGHT,
        intra_node=_NVLINK_H100,
        inter_node=_IB_H100,
    ),
    GpuEntry(
        name="H100-96GB",
        rates={
            "fp32": _fp32(67, _H100),
            "bf16": RateEntry(
                peak_tflops=Published(989, _ACCELERATORS),
                efficiency=Fit("matmul_500w", _MAMF, 794.5 / 989),
                attention=Fit("attention_500w", "FlashAttention-2, the kernel PyTorch ships, in training runs"),
            ),
        },
        memory_gb=Published(96, _TITAN),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(2400, _TITAN),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_H100,
        tiling=_H100_TILING,
        gpus_per_node=_EIGHT,
        intra_node=_NVLINK_H100,
        inter_node=_IB_H100,
    ),
    GpuEntry(
        name="H100-PCIe",
        rates={
            "fp32": _fp32(51, _H100),
            "bf16": _half(
                756, _ACCELERATORS, 540, "a guess, not measured: SXM at a 350 W limit, as on A100", _H100_ATTENTION
            ),
        },
        memory_gb=Published(80, _ACCELERATORS),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(2000, _ACCELERATORS),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_H100,
        tiling=_tiling(114, "recalled: NVIDIA H100 datasheet"),
        gpus_per_node=Assumed(8, "a guess: common 4U servers hold eight cards"),
        intra_node=_pcie("PCIe 5 x16", 63, "recalled: PCI Express 5.0 specification, 32 GT/s x 16 lanes, 128b/130b"),
        inter_node=_network(
            "200 Gb/s per GPU", Assumed(25, "200 Gb/s line rate; four 400 Gb/s adapters for eight cards")
        ),
    ),
    GpuEntry(
        name="H200",
        rates={"fp32": _fp32(67, "recalled: NVIDIA H200 datasheet"), "bf16": _H100_HALF},
        memory_gb=Published(141, _ACCELERATORS),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(4800, _ACCELERATORS),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_H100,
        tiling=_H100_TILING,
        gpus_per_node=_EIGHT,
        intra_node=_NVLINK_H100,
        inter_node=_IB_H100,
    ),
    GpuEntry(
        name="B200",
        rates={
            "fp32": _fp32(75, _B200),
            "bf16": _half(
                2250,
                _ACCELERATORS,
                1745,
                _MAMF,
                Assumed(0.35, "a guess, not measured: about the fraction of H100"),
            ),
        },
        memory_gb=Published(180, _ACCELERATORS),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(7700, "NVIDIA/dgxc-benchmarking README.md @v26.06.01"),
        memory_efficiency=_MEMORY_EFFICIENCY,
        kernel_launch_us=_LAUNCH,
        host=_HOST_H100,
        tiling=_tiling(148, _B200),
        gpus_per_node=_EIGHT,
        intra_node=_nvlink(
            "NVLink 5",
            900,
            0.75,
            "ring busbw 673-682 of 900 GB/s, 4 to 8 GPUs",
            Published(470, f"NVLS all-reduce: 838 GB/s busbw on 8 GPUs = 479 GB/s payload, 778 on 6 = 467; {_NETWORK}"),
        ),
        inter_node=_network("NDR InfiniBand or EFA v4", Published(50, f"8 x 400 Gb/s, {_NETWORK}")),
    ),
    GpuEntry(
        name="MI300X",
        rates={
            "fp32": _fp32(163.4, _MI300X),
            "bf16": _half(
                1307,
                _ACCELERATORS,
                668.4,
                _MAMF,
                Assumed(0.25, "recalled: ROCm FlashAttention-2 runs at about 300 TFLOP/s"),
            ),
        },
        memory_gb=Published(192, _ACCELERATORS),
        reserved_gb=_RESERVED,
        bandwidth_gb_s=Published(5300, _ACCELERATORS),
        memory_efficiency=Assumed(0.75, "recalled: stream-like kernels reach 4.0-4.3 of 5.3 TB/s"),
        kernel_launch_us=Assumed(6.0, "a guess, not measured: HIP launches are slower than CUDA's"),
        host=_HOST_H100,
        tiling=_tiling(304, _MI300X),
        gpus_per_node=_EIGHT,
        intra_node=LinkEntry(
            name="Infinity Fabric",
            bandwidth_gb_s=Published(448, _NETWORK),
            efficiency=Assumed(0.70, "busbw 313 of 448 GB/s on 8 GPUs, 48 of 64 on 2"),
            base_latency_us=Assumed(25.0, "a guess, not measured: RCCL as NCCL with slower launches"),
            hop_latency_us=Assumed(2.0, "a guess, not measured: RCCL as NCCL"),
            peer_gb_s=Published(64, f"one xGMI link per pair, {_NETWORK}"),
        ),
        inter_node=_network("400 Gb/s per GPU", Assumed(50, "recalled: eight 400 Gb/s adapters for eight GPUs")),
    ),
    GpuEntry(
        name="CPU",
        rates={
            "fp32": RateEntry(
                peak_tflops=Assumed(
                    0.16, "computed: 2.5 GHz x 16 lanes x 2 (fused multiply-add) x 2 ports, one AVX-512 core"
                ),
                efficiency=Assumed(0.25, "one thread: 26-59 GFLOP/s at sizes 256-1024, measured on a shared machine"),
                attention=Assumed(0.10, "a guess, not measured: blocked, but not tuned for short rows"),
            ),
            "bf16": RateEntry(
                peak_tflops=Assumed(0.16, "as fp32: no matrix unit for bf16 assumed"),
                efficiency=Assumed(0.10, "16 GFLOP/s measured at size 512 on one thread"),
                attention=Assumed(0.05, "a guess, not measured: half of fp32"),
            ),
        },
        memory_gb=Assumed(4, "a share of the 16-24 GB of a small continuous-integration machine"),
        reserved_gb=Assumed(0.5, "one Python process with torch imported"),
        bandwidth_gb_s=Assumed(10, "a guess: one core's share of two DDR4-2666 channels"),
        memory_efficiency=Assumed(0.5, "a guess; one run on a busy machine gave 2.6 GB/s, which is half of this"),
        kernel_launch_us=Assumed(12.0, "11.6 us measured for an eager addition of 16 numbers"),
        host=HostEntry(
            link_gb_s=Assumed(10, "host and device memory are the same"),
            link_efficiency=Assumed(0.8, "as the memory"),
            memory_gb_s=Assumed(10, "the rank's own memory"),
            memory_efficiency=Assumed(0.8, "as the memory"),
        ),
        is_cpu=True,
        tiling=TilingEntry(
            tiles=(Tile(16, 48, 1.0), Tile(4, 16, 0.6)),
            why_tiles="a guess, not measured: accumulators that fit into the vector registers of a core",
            units=Assumed(1, "one rank computes on one core"),
            half_depth=Assumed(32.0, "a guess, not measured: a matmul of size 64 reaches more than half"),
        ),
        gpus_per_node=Assumed(8, "ranks on one machine"),
        intra_node=LinkEntry(
            name="gloo over loopback",
            bandwidth_gb_s=Assumed(2.0, "a guess, not measured: one core copying through a TCP loopback socket"),
            efficiency=Assumed(
                0.4, "a guess, not measured idle: gloo copies and reduces on the core that also computes"
            ),
            base_latency_us=Assumed(150.0, "a guess, not measured idle: a thread hand-over and several system calls"),
            hop_latency_us=Assumed(
                50.0, "a guess, not measured idle: one socket round between processes that share cores"
            ),
        ),
        inter_node=LinkEntry(
            name="gloo over Ethernet",
            bandwidth_gb_s=Assumed(1.25, "10 Gb/s Ethernet line rate"),
            efficiency=Assumed(0.5, "a guess, not measured: as over loopback"),
            base_latency_us=Assumed(200.0, "a guess, not measured: as over loopback"),
            hop_latency_us=Assumed(100.0, "a guess, not measured: the network stack on both sides"),
        ),
    ),
)

CATALOGUE: dict[str, GpuEntry] = {entry.name.lower(): entry for entry in _ENTRIES}

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
    "h200-sxm": "h200",
    "b200-sxm": "b200",
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


def make_cluster(gpu: str, num_gpus: int, gpus_per_node: int | None = None, *, fitted: Fitted = FITTED) -> Cluster:
    """``num_gpus`` devices of a catalogued type in the type's usual nodes.

    ``gpus_per_node`` defaults to the usual node, or to ``num_gpus`` if that is smaller. fitted: other constants.
    Raises InvalidCluster for an unknown GPU or counts that do not divide.
    """
    entry = find_gpu(gpu)
    return Cluster(
        device=entry.device(fitted),
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node if gpus_per_node is not None else min(num_gpus, int(entry.gpus_per_node.value)),
        intra_node=entry.intra_node.link(),
        inter_node=entry.inter_node.link(),
    )
