"""Devices are known by the names that their drivers give them."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.errors import InvalidCluster
from autopar.local_cluster import catalogue_name

NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "Tesla V100-SXM2-32GB": "v100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "AMD Instinct MI325X": "mi325x",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_drivers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert catalogue_name(torch.device("cuda")) == NAMES[name]


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090"])
def test_what_is_not_in_the_catalogue_is_not_taken_for_its_namesake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    with pytest.raises(InvalidCluster, match="not in the catalogue"):
        catalogue_name(torch.device("cuda"))
