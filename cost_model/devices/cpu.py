"""One core of a machine as a device. ``autopar profile`` measures the machine; these are stand-ins."""

from __future__ import annotations

from autopar.cost_model.hardware.catalogue_entry import Assumed, GpuEntry, HostEntry, LinkEntry, RateEntry, TilingEntry
from autopar.cost_model.hardware.matmul_efficiency import Tile

# Products whose scales are of tiles are of what the numbers stand for, in fp32.
_IN_FP32 = RateEntry(
    peak_tflops=Assumed(0.16, "as fp32, in which they are computed"),
    efficiency=Assumed(0.20, "a guess, not measured: the fp32 product, whose operands are widened first"),
    attention=None,
)

CPU = GpuEntry(
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
        "fp8": RateEntry(
            peak_tflops=Assumed(0.16, "as fp32: no matrix unit for 8-bit floats assumed"),
            efficiency=Assumed(
                0.10, "50-78 GFLOP/s where fp32 reached 140-150: half to a third of fp32, on one thread"
            ),
            attention=None,
        ),
        "fp8-block": _IN_FP32,
        "mxfp8": _IN_FP32,
        "nvfp4": _IN_FP32,
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
    architecture="cpu",
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
        efficiency=Assumed(0.4, "a guess, not measured idle: gloo copies and reduces on the core that also computes"),
        base_latency_us=Assumed(150.0, "a guess, not measured idle: a thread hand-over and several system calls"),
        hop_latency_us=Assumed(50.0, "a guess, not measured idle: one socket round between processes that share cores"),
    ),
    inter_node=LinkEntry(
        name="gloo over Ethernet",
        bandwidth_gb_s=Assumed(1.25, "10 Gb/s Ethernet line rate"),
        efficiency=Assumed(0.5, "a guess, not measured: as over loopback"),
        base_latency_us=Assumed(200.0, "a guess, not measured: as over loopback"),
        hop_latency_us=Assumed(100.0, "a guess, not measured: the network stack on both sides"),
    ),
)
