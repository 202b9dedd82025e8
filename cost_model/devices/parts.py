"""Common parts of several devices' entries: pages, habits of libraries, hosts and kinds of links."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model.hardware.catalogue_entry import (
    Assumed,
    DiskEntry,
    Fit,
    HostEntry,
    LinkEntry,
    Published,
    RateEntry,
    TilingEntry,
)
from autopar.cost_model.hardware.device import GB
from autopar.cost_model.hardware.matmul_efficiency import Tile

# Pages that several entries quote.
ACCELERATORS = "stas00/ml-engineering compute/accelerator/README.md @744d01e"
NETWORK = "stas00/ml-engineering network/README.md @744d01e"
MAMF = "best shape of the MAMF finder, " + ACCELERATORS

RESERVED = Assumed(
    2.7,
    "a guess: 0.5 GB of a CUDA context and 0.4 for each of five or six communicators of NCCL; 0.5 and 1.4 GiB beside "
    "PyTorch's allocator are printed by two runs that were out of memory",
)
MEMORY_EFFICIENCY = Fit("memory", "large elementwise kernels reach 80-90 % of HBM bandwidth (recalled)")
LAUNCH = Fit("launch_us", "kernels are queued ahead, yet each costs some microseconds of tail and gap")
TILES = (Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.92), Tile(128, 64, 0.8), Tile(64, 64, 0.65))
SUSTAINED = Fit("sustained", "the share of the rate of a kernel alone that a training step reaches, as of products")
EIGHT = Published(8, "recalled: DGX and HGX systems hold eight GPUs")


def capacity(gib: float, what: str = "") -> Published:
    """What CUDA says a device has, in GB: marketed GB are GiB less what error correction and firmware take."""
    return Published(round(gib * 2**30 / GB, 2), f"'total capacity' of PyTorch's out-of-memory errors, {gib} GiB{what}")


def fp32(tflops: float, source: str) -> RateEntry:
    """Matrix rate in fp32, of ``tflops`` TFLOP/s."""
    return RateEntry(
        peak_tflops=Published(tflops, source),
        efficiency=Assumed(
            0.85, "a guess, not measured: cuBLAS SGEMM without TF32, which PyTorch leaves off, runs near its peak"
        ),
        attention=Assumed(
            0.35, "a guess, not measured: the memory-efficient kernel serves fp32, FlashAttention does not"
        ),
    )


def half(
    tflops: float,
    source: str,
    best_tflops: float,
    why: str,
    *,
    watts: float = 1.0,
    attention: Assumed | Fit | None = None,
) -> RateEntry:
    """best_tflops: the highest rate measured on any shape. watts: as of ``Fit``, here of attention too by default."""
    return RateEntry(
        peak_tflops=Published(tflops, source),
        efficiency=Fit("sustained", why, best_tflops / tflops, watts),
        attention=replace(SUSTAINED, watts=watts) if attention is None else attention,
    )


# Of an H100's 1,979 TFLOP/s in 8-bit floats. One H200 of ours reached 1,519 with later software, and 1,453 there
# (benchmarks/results/2026-11-26-gpu-kernels.md); rates of all devices are of one tool.
H100_EIGHT = 1402.6 / 1979


def eight_bits(
    tflops: float, source: str, best: float = H100_EIGHT, why: str = "taken from H100", *, watts: float = 1.0
) -> RateEntry:
    """Matrix rate in 8-bit floats with scales. A fit of its own is not possible: there are few published runs.

    best: the highest rate measured on any shape, of the peak. watts: as of ``Fit``.
    """
    return RateEntry(
        peak_tflops=Published(tflops, source), efficiency=Fit("sustained", why, best, watts), attention=None
    )


def by_tile(rate: RateEntry) -> RateEntry:
    """The rate of products of 8-bit floats by tiles of 128, on a device with this one of those with one scale."""
    why = (
        "as with one scale: DeepGEMM's kernels reach up to 1,550 of 1,979 TFLOP/s on an H800 (recalled: its README), "
        "cuBLAS on our H200 1,519 with one"
    )
    assert isinstance(rate.efficiency, Fit), "the rate of 8-bit floats is what a training step leaves of a kernel's"
    return replace(rate, efficiency=replace(rate.efficiency, reason=why))


def microscaled(eight: float, four: float, source: str, four_source: str, one: RateEntry) -> dict[str, RateEntry]:
    """Rates of 8-bit floats by tiles of 32 and of 4-bit ones by 16, in TFLOP/s. one: of 8-bit floats with one scale."""
    assert isinstance(one.efficiency, Fit), "the rate of 8-bit floats is what a training step leaves of a kernel's"
    reached = replace(one.efficiency, reason="a guess, not measured: what the device reaches with one scale")
    return {
        name: RateEntry(peak_tflops=Published(tflops, said), efficiency=reached, attention=None)
        for name, tflops, said in (("mxfp8", eight, source), ("nvfp4", four, four_source))
    }


def tiling(units: int, source: str) -> TilingEntry:
    """Tiles of a GPU with so many multiprocessors."""
    return TilingEntry(
        tiles=TILES,
        why_tiles="a guess, not measured: the tiles that libraries have; smaller ones read more for what they compute",
        units=Published(units, source),
        half_depth=Fit("half_depth", "set-up and write-out of a tile, as steps along its depth"),
    )


def network(name: str, bandwidth_gb_s: Published | Assumed) -> LinkEntry:
    """A network link of this bandwidth a device and direction, in GB/s."""
    return LinkEntry(
        name=name,
        bandwidth_gb_s=bandwidth_gb_s,
        efficiency=Assumed(0.90, "busbw 192 of 200 GB/s (DGX A100), 382 of 400 (B200 EFA), 350 of 400 (248 nodes)"),
        base_latency_us=Assumed(
            25.0, "a guess, not measured: as within a node, plus the proxy thread that drives the NIC"
        ),
        hop_latency_us=Assumed(5.0, "B200 EFA: 1 MiB on 32 GPUs takes 380 us in 62 ring steps; InfiniBand less"),
    )


def efa(bandwidth_gb_s: Published | Assumed) -> LinkEntry:
    """Amazon's network. On 32 B200 an all-reduce of 1 MiB took 0.38 ms, of 64 MiB 0.83 and of 256 MiB 2.3 (nccl-tests;
    stas00/ml-engineering network/README.md @744d01e): 62 steps of a ring, 5 us each, and the bytes give 0.34, 0.68 and
    1.7 ms; a tree would take 0.06, 0.4 and 1.5."""
    return replace(network("EFA", bandwidth_gb_s), trees=False)


def host(generation: int, link_gb_s: float, memory_gb_s: float, memory: str, memory_gb: float) -> HostEntry:
    """A host on PCI Express, in GB/s and GB: link of a GPU, its share of the memory bandwidth and of the memory."""
    return HostEntry(
        link_gb_s=Published(link_gb_s, f"recalled: PCI Express {generation}.0 specification, 16 lanes, 128b/130b"),
        link_efficiency=Assumed(
            0.79, "nvbandwidth on 8 A100: 24.8 of 31.5 GB/s either way (forums.developer.nvidia.com/t/352186)"
        ),
        memory_gb_s=Assumed(memory_gb_s, f"recalled: {memory}, divided among eight GPUs"),
        memory_efficiency=Assumed(0.60, "a guess, not measured: AdamW streams seven arrays on the cores of one GPU"),
        memory_gb=Assumed(memory_gb, f"recalled: datasheet of the system ({memory}), divided among its GPUs"),
    )


def disks(read_gb_s: float, write_gb_s: float, drive: str) -> DiskEntry:
    """One NVMe drive of 3.84 TB for each GPU, as DGX A100 of 80 GB and later ones have."""
    return DiskEntry(
        read_gb_s=Assumed(read_gb_s, f"recalled: datasheet of {drive}, large reads"),
        write_gb_s=Assumed(write_gb_s, f"recalled: datasheet of {drive}, large writes"),
        efficiency=Assumed(0.8, "a guess, not measured: a file system and checksums take their share"),
        capacity_gb=Assumed(3840, "recalled: eight drives of 3.84 TB for eight GPUs (in DGX-2 for sixteen)"),
    )


HOST_V100 = host(3, 15.75, 32, "2 Xeon of 6 channels DDR4-2666 (DGX-2)", 1500 / 16)
HOST_A100_40 = host(4, 31.5, 51, "2 EPYC 7742 of 8 channels DDR4-3200 (DGX A100 of 40 GB)", 1000 / 8)
HOST_A100 = host(4, 31.5, 51, "2 EPYC 7742 of 8 channels DDR4-3200 (DGX A100 of 80 GB)", 2000 / 8)
HOST_H100 = host(5, 63, 77, "2 Xeon 8480C of 8 channels DDR5-4800 (DGX H100)", 2000 / 8)
DISK_3 = disks(3.2, 1.9, "a drive on PCI Express 3.0 (Samsung PM983)")
DISK_4 = disks(7.0, 3.8, "a drive on PCI Express 4.0 (Samsung PM1733)")
