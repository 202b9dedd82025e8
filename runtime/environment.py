"""Settings of NCCL, gloo and torch.distributed for the processes of a job: network, timeouts, logging.

    interface="eth0"      NCCL_SOCKET_IFNAME==eth0  GLOO_SOCKET_IFNAME=eth0
    infiniband="mlx5_0"   NCCL_IB_HCA=mlx5_0;  "off": NCCL_IB_DISABLE=1
    debug=True            NCCL_DEBUG=INFO  TORCH_DISTRIBUTED_DEBUG=DETAIL  TORCH_SHOW_CPP_STACKTRACES=1
    timeout_s=600         the limit of joining the job and of every collective

What is not given here stays as the environment has it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import set_debug_level_from_env  # type: ignore[attr-defined]  # as HashStore in launch

from autopar.ir.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """interface: of the network between machines, by its exact name. infiniband: NCCL's adapters, or "off".

    debug: say how the ranks connect, and check that they all issue the same collectives, which takes time.
    timeout_s: None for torch's own (30 minutes on gloo, 10 on nccl).
    """

    interface: str | None = None
    infiniband: str | None = None
    debug: bool = False
    timeout_s: float | None = None

    @property
    def timeout(self) -> timedelta | None:
        """Time after which a collective fails; None for torch's default."""
        return None if self.timeout_s is None else timedelta(seconds=self.timeout_s)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables to set, given those that are set. An option outweighs a variable; a level of debugging that is set
        stays."""
        found: dict[str, str] = {}
        if self.interface is not None:
            # With "=" NCCL takes the name as it is, not as the beginning of names.
            found |= {"NCCL_SOCKET_IFNAME": f"={self.interface}", "GLOO_SOCKET_IFNAME": self.interface}
        if self.infiniband == "off":
            found["NCCL_IB_DISABLE"] = "1"
        elif self.infiniband is not None:
            found["NCCL_IB_HCA"] = self.infiniband
        if self.debug:
            wanted = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_SHOW_CPP_STACKTRACES": "1"}
            found |= {name: value for name, value in wanted.items() if name not in environ}
        return found

    def apply(self) -> None:
        """Set them in this process, before it joins a job. Raises LaunchError for an interface that it has not."""
        if self.interface is not None:
            there = [name for _, name in socket.if_nameindex()]
            if self.interface not in there:
                raise LaunchError(
                    f"{socket.gethostname()} has no network interface {self.interface!r}; it has {', '.join(there)}.\n"
                    "  try: --network-interface with one of these (`ip addr` shows their addresses)"
                )
        os.environ.update(self.variables(os.environ))
        if self.debug:
            set_debug_level_from_env()
