"""Cluster files, histograms of lengths and expert loads that are nearly right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.cli.request import read_loads, read_yaml
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.ir.lengths import LengthHistogram
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from tests.fuzz.harness import Read, failures, none_of
from tests.fuzz.models import captured_net
from tests.fuzz.mutation import as_json, as_yaml, changed_value

CLUSTERS: list[dict[str, Any]] = [
    yaml.safe_load(text)
    for text in (
        "{gpu: a100-80gb, num_gpus: 4, gpus_per_node: 2, memory_gb: 80, host_gb_s: 24.8, stack: autopar,"
        " inter_node: {bandwidth_gb_s: 12.5, efficiency: 0.85, latency_us: 8, trees: false, alone_gb_s: 20,"
        " relative_time: {all_gather: 1.1, zero_gather: 0.9}, overlap: 0.5, base_latency_us: 3}}",
        "{nodes: [{gpu: a100-80gb, num_nodes: 2}, {gpu: h100-sxm, num_nodes: 2}], gpus_per_node: 2,"
        " nics: {per_node: 4, bandwidth_gb_s: 25}, pods: {num_nodes: 2, oversubscription: 4}}",
        "{gpu: h100-sxm, num_gpus: 4, matmul_efficiency: 0.7, half_depth: 100, memory_bandwidth_gb_s: 2000,"
        " bandwidth_by_mib: {1: 500, 64: 2000}, launch_us: 3, transcendental_ns: 0.001, optimizer_gb_s: 1500,"
        " jitter_us: 10, rates: {bf16: {peak_tflops: 900, efficiency: 0.7, attention_efficiency: 0.5,"
        " attention_by_length: {512: 0.3, 4096: 0.5}}, fp8: {peak_tflops: 1800, efficiency: 0.6}}}",
    )
]
LENGTHS = {"format": 1, "edges": [1, 100, 200, 400], "counts": [10, 30, 5]}
LOADS = {"layers.0.mlp": [10, 20, 30, 40], "layers.1.mlp": [1, 2, 3, 0]}


def read_cluster(chance: random.Random, folder: Path) -> None:
    path = folder / "cluster.yaml"
    path.write_bytes(as_yaml(changed_value(chance.choice(CLUSTERS), chance), chance))
    cluster = cluster_from_dict(read_yaml(path), source=str(path))
    if chance.random() < 0.05:
        estimate_captured(captured_net(), cluster, Constraints(tp=2))


def read_lengths(chance: random.Random, folder: Path) -> None:
    path = folder / "lengths.json"
    path.write_bytes(as_json(changed_value(LENGTHS, chance), chance))
    found = LengthHistogram.load(path)
    found.drawn(100, 0)
    found.quantile(0.9)


def read_expert_loads(chance: random.Random, folder: Path) -> None:
    path = folder / "loads.json"
    path.write_bytes(as_json(changed_value(LOADS, chance), chance))
    Constraints(expert_load=read_loads(path))


KINDS = [("cluster", read_cluster, 1500), ("lengths", read_lengths, 1500), ("expert load", read_expert_loads, 700)]


@pytest.mark.parametrize(("kind", "read", "count"), KINDS)
def test_an_input_is_read_or_refused(kind: str, read: Read, count: int, tmp_path: Path) -> None:
    captured_net()
    none_of(failures(kind, read, count, tmp_path))
