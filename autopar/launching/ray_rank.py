"""One rank as an actor of Ray. Imports torch only once its environment is set."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.ir.errors import AutoparError, LaunchError

if TYPE_CHECKING:
    from autopar.runtime.environment import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a rank's function: a value, an error of autopar, the traceback of another error, or why the rank
    died.

    ended_s: when, by the clock of its machine.
    """

    value: Any = None
    error: AutoparError | None = None
    trace: str = ""
    died: str | None = None
    ended_s: float = 0.0

    @property
    def well(self) -> bool:
        """Whether the function returned."""
        return self.error is None and not self.trace and self.died is None


@dataclass(frozen=True, slots=True)
class Standing:
    """host: the machine's id with Ray. gpus: those that Ray gave to this actor."""

    host: str
    gpus: list[str]


class RayRank:
    """A process that becomes a rank: ``place``, then ``prepare`` (and ``serve`` on rank 0), then ``run``."""

    def place(self) -> Standing:
        """The machine of this actor and the GPUs that Ray gave it."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(number) for number in context.get_accelerator_ids().get("GPU", [])]
        return Standing(context.get_node_id(), gpus)

    def prepare(self, variables: dict[str, str]) -> None:
        """Set environment variables of the process."""
        os.environ.update(variables)

    def serve(self, num_ranks: int, interface: str | None) -> tuple[str, int]:
        """Address and port of the store at which the ranks meet; it lives as long as this actor."""
        import ray

        from autopar.runtime.stores import TCPStore

        address = ray.util.get_node_ip_address() if interface is None else address_of(interface)
        self._store = TCPStore(address, 0, num_ranks, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], environment: Environment) -> Outcome:
        """Join the job and call ``function``. A failed rank stays in the job until its actor is killed."""
        import torch.distributed as dist

        from autopar.runtime.launch import ensure_process_group

        try:
            ensure_process_group(environment)
            value = function(*arguments)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
        except AutoparError as error:
            return Outcome(error=error, ended_s=time.time())
        except Exception:  # whatever it is, the caller is told
            return Outcome(trace=traceback.format_exc(), ended_s=time.time())
        return Outcome(value=value, ended_s=time.time())


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this machine. Raises LaunchError."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise LaunchError(
                f"{socket.gethostname()} has no address on the network interface {interface!r}: {error}.\n"
                f"  it has: {there}\n  try: --network-interface with one of these"
            ) from error
    return socket.inet_ntoa(answer[20:24])
