"""From samples to the figures of a cluster file.

Times are fitted in proportion: an error of 10 % counts alike whether it is of a microsecond or of a second.

    product      FLOPs / (peak * efficiency * fraction_of_rate(shape)) + launch    (on a core + bytes / bandwidth)
    collective   base + rounds * hop + factor(kind) * bytes each rank sends / bandwidth      for each kind of link

``efficiency`` is the median over the products, for the depth at which half the rate is reached that leaves the least
error. On a core it is the median of the time that they take: steps are made of the large ones, and what small ones lose
at the edges of tiles and gain by caches depends on the library. The terms of a link are the non-negative ones of least
absolute relative error, so that a few messages that a busy machine delayed do not count; ``factor`` is 1 for an
all-reduce. A link that one device of a node has for itself is faster by the ratio of the sends. What of an all-reduce
can overlap with compute is what the two at once save, as ``gradient_sync.exposed_time`` counts it. Ranks wait for each
other as long as a small all-reduce takes between computations more than by itself, which is taken to grow with the root
of the time that they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import log2, sqrt
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.cost_model.communication.collectives import issued_as, latency_rounds, lost_beside, volume_bytes
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.hardware.device import GB, JITTER_AFTER_S, MIB, Device
from autopar.cost_model.hardware.matmul_efficiency import fraction_of_rate
from autopar.ir.redistribution import Collective
from autopar.profiling.samples import COLLECTIVES, KINDS, Communicated, Overlapped, Product, Samples, Traffic, Waited

Floats = npt.NDArray[np.float64]

# Bytes that a kernel moves from which on its rate is that of memory.
_LARGE_KERNEL = 8 * MIB

# Depths at half of the rate that are tried.
_HALF_DEPTHS = tuple(float(8 * 2 ** (step / 2)) for step in range(15))


def description_of(samples: Samples, cluster: Cluster, gpu: str) -> dict[str, Any]:
    """The cluster file, as a mapping. cluster: the catalogue's, which serves where nothing was measured."""
    by_size = bandwidths_by_size(samples.traffic, samples.launch_s)
    traffic = median(rate for size, rate in by_size if size >= _LARGE_KERNEL)
    device = replace(
        cluster.device,
        kernel_launch_s=samples.launch_s,
        memory_bandwidth=traffic,
        memory_efficiency=1.0,
        bandwidth_by_size=by_size if cluster.device.is_cpu else (),
    )
    half_depth = best_half_depth(samples.products, device)
    tiling = replace(device.tiling, half_depth=half_depth)
    rates: dict[str, dict[str, Any]] = {}
    for precision in dict.fromkeys(product.precision for product in samples.products):
        own = [product for product in samples.products if product.precision == precision]
        peak = max(device.peak_flops(precision), *(product.flops / product.seconds for product in own))
        achieved = _achieved(own, replace(device, tiling=tiling))
        attentions = {run.length: run.flops / run.seconds for run in samples.attention if run.precision == precision}
        attention = max(attentions.values())
        rates[precision] = {
            "peak_tflops": _rounded(peak / 1e12),
            "efficiency": _rounded(min(1.0, achieved / peak)),
            "attention_efficiency": _rounded(min(1.0, attention / peak)),
        }
        if device.is_cpu:
            by_length = {length: _rounded(min(1.0, rate / peak)) for length, rate in sorted(attentions.items())}
            rates[precision]["attention_by_length"] = by_length
    found: dict[str, Any] = {
        "gpu": gpu,
        "num_gpus": cluster.num_gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "rates": rates,
        "half_depth": _rounded(half_depth),
        "memory_bandwidth_gb_s": _rounded(traffic / GB),
        "launch_us": _rounded(samples.launch_s * 1e6),
    }
    if device.bandwidth_by_size:
        rates_by_size = {_rounded(size / MIB): _rounded(rate / GB) for size, rate in device.bandwidth_by_size}
        found["bandwidth_by_mib"] = rates_by_size
    if samples.functions:
        found["functions_ns"] = {
            name: [_rounded(1e9 * seconds) for seconds in own] for name, own in samples.functions.items()
        }
    if samples.optimizer:
        found["optimizer_gb_s"] = _rounded(median(run.num_bytes / run.seconds for run in samples.optimizer) / GB)
    if samples.waited:
        found["jitter_us"] = _rounded(median(map(jitter_of, samples.waited)) * 1e6)
    for name, outside in (("intra_node", False), ("inter_node", True)):
        own_links = [one for one in samples.communicated if one.group.spans_nodes is outside]
        if own_links:
            found[name] = link_figures(own_links, device)
            beside = [one for one in samples.overlapped if one.group.spans_nodes is outside]
            if beside:
                link = found[name]["bandwidth_gb_s"] * GB
                found[name]["overlap"] = _rounded(median(overlap_of(one, link, device) for one in beside))
    return found


def bandwidths_by_size(traffic: Sequence[Traffic], launch_s: float) -> tuple[tuple[float, float], ...]:
    """(bytes that a kernel moves, bytes/s beside its launch), the fewest first; one for each doubling."""
    alike: dict[int, list[Traffic]] = {}
    for run in traffic:
        alike.setdefault(int(log2(run.kernel_bytes)), []).append(run)
    return tuple(
        (mean(run.kernel_bytes for run in runs), mean(run.bytes_per_s(launch_s) for run in runs))
        for _, runs in sorted(alike.items())
    )


def best_half_depth(products: list[Product], device: Device) -> float:
    """The depth that leaves the least absolute error of the logarithms, over all precisions."""

    def error(half_depth: float) -> float:
        trial = replace(device, tiling=replace(device.tiling, half_depth=half_depth))
        total = 0.0
        for precision in {product.precision for product in products}:
            own = [product for product in products if product.precision == precision]
            rates = np.log(_endless_rates(own, trial))
            total += float(np.abs(rates - np.median(rates)).sum())
        return total

    return min(_HALF_DEPTHS, key=error)


def _achieved(products: list[Product], device: Device) -> float:
    """FLOP/s of an endless product."""
    rates = _endless_rates(products, device)
    if not device.is_cpu:
        return float(np.median(rates))
    order = np.argsort(rates)
    taken = np.cumsum([products[number].seconds for number in order])
    return float(rates[order[np.searchsorted(taken, taken[-1] / 2)]])


def _endless_rates(products: list[Product], device: Device) -> Floats:
    """What each product says of the rate of an endless one."""
    return np.array(
        [
            product.flops
            / max(product.seconds - beside_product_s(product, device), product.seconds / 10)
            / fraction_of_rate(device.tiling, product.rows, product.columns, product.depth)
            for product in products
        ]
    )


def beside_product_s(product: Product, device: Device) -> float:
    """Seconds of a product that no rate of its FLOPs explains."""
    return device.kernel_launch_s + (device.kernel_seconds(product.num_bytes) if device.is_cpu else 0.0)


def link_figures(samples: list[Communicated], device: Device) -> dict[str, Any]:
    """The section of one kind of link. device: how it issues collectives."""
    alone = [one for one in samples if one.alone]
    samples = [one for one in samples if not one.alone]
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in samples)]
    rows = np.array([_terms(one, kinds, device) for one in samples])
    seconds = np.array([one.seconds for one in samples])
    solved = _least_absolute(rows / seconds[:, None])
    base, hop, *per_byte = (float(value) for value in solved)
    # Where a kind's bytes were never seen to cost anything, its largest message says at most how much.
    for number, kind in enumerate(kinds):
        if per_byte[number] <= 0:
            own = [(one.seconds / _sent(one, device), _sent(one, device)) for one in samples if one.kind == kind]
            per_byte[number] = max(own, key=lambda pair: pair[1])[0]
    unit = per_byte[0]
    figures: dict[str, Any] = {
        "bandwidth_gb_s": _rounded(1 / unit / GB),
        "efficiency": 1.0,
        "base_latency_us": _rounded(base * 1e6),
        "latency_us": _rounded(hop * 1e6),
        "relative_time": {kind: _rounded(value / unit) for kind, value in zip(kinds, per_byte, strict=True)},
    }
    if alone:
        # Their latency is that of the others.
        spent = [max(one.seconds - base - hop, one.seconds / 10) / one.payload_bytes for one in alone]
        large = spent[len(spent) // 2 :]
        faster = per_byte[kinds.index("send")] / median(large)
        if faster > 1.1:
            figures["alone_gb_s"] = _rounded(faster / unit / GB)
    return figures


def overlap_of(one: Overlapped, link: float, device: Device) -> float:
    """Share of an all-reduce that runs beside compute, which is slower for it. link: bytes/s of one rank."""
    lost = lost_beside(link * (one.group.ranks_per_node if one.group.spans_nodes else 1), device)
    saved = one.communication_s + one.compute_s - one.both_s
    return min(1.0, max(0.0, saved / min(one.communication_s, one.compute_s) / (1 - lost)))


def jitter_of(one: Waited) -> float:
    """Seconds that ranks wait after a millisecond of compute."""
    return max(0.0, one.added_s - one.alone_s) * sqrt(JITTER_AFTER_S / one.compute_s)


def _terms(one: Communicated, kinds: Sequence[str], device: Device) -> list[float]:
    """What base, hop and seconds a byte of each kind are multiplied by."""
    rounds = 1.0 if one.kind == "send" else latency_rounds(_issued(one, device), one.group)
    return [1.0, rounds, *(_sent(one, device) if kind == one.kind else 0.0 for kind in kinds)]


def _issued(one: Communicated, device: Device) -> Collective:
    return issued_as(one.kind, COLLECTIVES[one.kind], device)


def _sent(one: Communicated, device: Device) -> float:
    """Bytes over the slowest link, of each rank that has its share of it."""
    if one.kind == "send":
        return float(one.payload_bytes)
    size = one.group.size
    if _issued(one, device) is Collective.ALL_TO_ALL and one.group.spans_nodes:
        return (size - one.group.ranks_per_node) / size * one.payload_bytes
    shared = one.group.ranks_per_node if one.group.spans_nodes else 1
    return volume_bytes(COLLECTIVES[one.kind], one.payload_bytes, size) / shared


def _least_absolute(rows: Floats) -> Floats:
    """x >= 0 of least sum |rows x - 1|, by squares that are weighted with the errors before."""
    weights = np.ones(len(rows))
    for _ in range(20):
        found = _non_negative(rows, weights)
        weights = 1 / np.maximum(np.abs(rows @ found - 1), 0.02)
    return found


def _non_negative(rows: Floats, weights: Floats) -> Floats:
    """x >= 0 of least weighted |rows x - 1|^2, by trying which of the first two are zero; the rest never are."""
    root = np.sqrt(weights)
    best, found = np.inf, np.zeros(rows.shape[1])
    others = tuple(range(2, rows.shape[1]))
    for number in range(3):
        for kept in combinations((0, 1), number):
            columns = [*kept, *others]
            part = np.linalg.lstsq(root[:, None] * rows[:, columns], root, rcond=None)[0].clip(min=0.0)
            error = float((weights * (rows[:, columns] @ part - 1) ** 2).sum())
            if error < best:
                best, found = error, np.zeros(rows.shape[1])
                found[columns] = part
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
