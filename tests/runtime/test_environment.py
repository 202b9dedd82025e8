"""Options of the network and of debugging, as variables; ranks that do not find each other say so."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from autopar.ir.errors import LaunchError
from autopar.runtime.environment import Environment
from tests.patience import run

ROOT = Path(__file__).parents[2]


def test_options_set_variables() -> None:
    assert Environment().variables({}) == {}
    found = Environment(interface="eth0", infiniband="mlx5_0", debug=True).variables({"NCCL_DEBUG": "TRACE"})
    assert found == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5_0",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
    }
    assert Environment(infiniband="off").variables({}) == {"NCCL_IB_DISABLE": "1"}


def test_an_interface_that_is_not_there_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"no network interface 'nosuch0'; it has lo"):
        Environment(interface="nosuch0").apply()


JOIN = """
from autopar.ir.errors import LaunchError
from autopar.runtime.environment import Environment
from autopar.runtime.launch import ensure_process_group
try:
    ensure_process_group(Environment(timeout_s=2))
except LaunchError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", [False, True])
def test_ranks_that_do_not_find_each_other_say_so(missing: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if missing:
        del job["MASTER_ADDR"]
    environ = {name: value for name, value in os.environ.items() if name not in job} | job
    environ["CUDA_VISIBLE_DEVICES"] = ""
    printed = run(sys.executable, "-c", JOIN, env=environ, cwd=ROOT).stdout
    if missing:
        assert "RANK is set, but not MASTER_ADDR" in printed
    else:
        assert f"rank 1 of 2 could not join the job at 127.0.0.1:{port}" in printed
