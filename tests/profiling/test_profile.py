"""Ranks measure their machine together; the cluster file they write can be planned for."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.cli.profile import run_profile
from autopar.cost_model.cluster_file import cluster_from_yaml
from autopar.cost_model.hardware.functions import FUNCTIONS
from autopar.ir.errors import InvalidCluster, InvalidInput
from autopar.profiling.profile import profile
from tests.harness import run_ranks


def measured(folder: str) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_profile(Path(folder, "c.yaml"), seconds=0.002, report=Path(folder, "c.html"), json=True)
    if os.environ["RANK"] == "0":
        Path(folder, "c.json").write_text(printed.getvalue())
    else:
        assert not printed.getvalue()
    return {}


def uneven() -> str:
    import torch.distributed as dist

    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank())
    with pytest.raises(InvalidCluster) as error:
        profile(lambda doing: None, seconds=0.002)
    return str(error.value)


def test_two_ranks_write_a_cluster_file_and_a_page(tmp_path: Path) -> None:
    run_ranks(measured, 2, str(tmp_path))
    text = (tmp_path / "c.yaml").read_text()
    described = yaml.safe_load(text)
    assert (described["gpu"], described["num_gpus"], described["gpus_per_node"]) == ("cpu", 2, 2)
    assert set(described["rates"]) == {"fp32", "bf16"}
    said = json.loads((tmp_path / "c.json").read_text())
    assert said["cluster"] == json.loads(json.dumps(described))
    assert list(described["rates"]["fp32"]["attention_by_length"]) == [32, 64, 128, 256, 512, 1024, 4096]
    assert all(fit["runs"] and fit["median_error"] <= abs(fit["largest_error"]) for fit in said["fits"])
    cluster = cluster_from_yaml(text)
    assert 1e8 < cluster.device.matmul_rate("fp32").peak_flops * cluster.device.matmul_rate("fp32").efficiency < 1e13
    assert set(described["functions_ns"]) == set(FUNCTIONS)
    assert cluster.device.function_time("tanh").forward_s > 0
    assert described["optimizer_gb_s"] * 1e9 == cluster.device.optimizer_bandwidth
    assert set(dict(cluster.intra_node.relative_time)) == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "zero_gather", "zero_scatter",
    }  # fmt: skip
    page = (tmp_path / "c.html").read_text()
    assert "matrix products, fp32" in page and "all_reduce, 2 ranks" in page


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"there is no folder .*missing"):
        run_profile(tmp_path / "missing" / "c.yaml")
    with pytest.raises(InvalidInput, match=r"there is no folder .*missing"):
        run_profile(tmp_path / "c.yaml", report=tmp_path / "missing" / "c.html")


def test_nodes_of_different_size_are_refused_on_every_rank() -> None:
    for message in run_ranks(uneven, 2):
        assert "the nodes of this job have 1 and 2 ranks" in message
