"""What is measured of a disk, as a cluster file has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.ir.errors import DiskError, InvalidCluster
from autopar.profiling.disk import host_memory_gb, measure_disk
from tests.harness import run_ranks


def measured(folder: str) -> dict[str, float] | str:
    try:
        return measure_disk(Path(folder), 2, lambda _: None)
    except DiskError as error:
        return str(error)


def test_a_disk_is_measured_by_all_ranks(tmp_path: Path) -> None:
    one, other = run_ranks(measured, 2, str(tmp_path))
    assert one == other
    cluster = cluster_from_dict({"gpu": "cpu", "num_gpus": 2, "disk": one, "host_memory_gb": host_memory_gb(2)})
    disk = cluster.device.disk
    assert disk is not None
    assert disk.read_bandwidth == one["read_gb_s"] * 1e9
    assert 0 < disk.capacity < 1e17
    assert cluster.device.host.memory_bytes > 1e8
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(measured, 2, str(tmp_path / "absent")):
        assert "no such folder" in said


@pytest.mark.parametrize("disk", [{"read_gb_s": 1}, {"read_gb_s": 0, "write_gb_s": 1, "capacity_gb": 1}, 5])
def test_a_cluster_file_says_all_of_a_disk(disk: object) -> None:
    with pytest.raises(InvalidCluster, match="disk"):
        cluster_from_dict({"gpu": "a100-80gb", "num_gpus": 8, "disk": disk})
