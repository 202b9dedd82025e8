"""Runs a test function on several gloo ranks of this machine.

    def body(scale):                     # a module-level function; runs on every rank
        x = torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(x)
        return x * scale

    def test_sum():
        for result in run_ranks(body, 4, 2.0):
            assert result.tolist() == [12.0, 12.0]

Ranks are forked from a server that has imported torch once, so starting them takes a fraction of a second.
Nothing hangs: a rank that raises ends the others, and past ``timeout`` all are killed and the error shows
where each one stood.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

# Seconds that the other ranks get to fail by themselves once one has, so that the first cause is reported.
_GRACE_S = 1.0


class RankFailure(AssertionError):
    """A rank raised, died or did not finish. The message holds the traceback of every such rank."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on ``num_ranks`` processes of one group; returns the results by rank.

    ``function`` is defined at the top level of a module; arguments and results travel by pickle (tensors by
    value; results are detached). Each rank runs one thread, seeded with 0. Raises RankFailure.
    """
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is not at the top level of a module, so ranks cannot import it")
    # Read by libraries when they start, so set before the server forks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor"])
    source = inspect.getsourcefile(function)
    assert source is not None
    payload = pickle.dumps((args, kwargs))

    with tempfile.TemporaryDirectory(prefix="autopar-ranks-") as folder:
        processes: list[ForkServerProcess] = []
        pending: dict[Connection, int] = {}
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                job = (
                    function.__module__,
                    source,
                    function.__qualname__,
                    payload,
                    folder,
                    rank,
                    num_ranks,
                    timeout,
                    backend,
                )
                process = context.Process(target=_rank_main, args=(sender, *job), daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                pending[receiver] = rank
            return _collect(pending, num_ranks, time.monotonic() + timeout, Path(folder), timeout)
        finally:
            for process in processes:
                process.join(_GRACE_S if not pending else 0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(
    pending: dict[Connection, int], num_ranks: int, deadline: float, folder: Path, timeout: float
) -> list[Any]:
    """Results by rank, or RankFailure."""
    results: list[Any] = [None] * num_ranks
    failures: dict[int, str] = {}
    while pending and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(pending), timeout=left):
            assert isinstance(ready, Connection)
            rank = pending.pop(ready)
            try:
                ok, payload = pickle.loads(ready.recv_bytes())
            except EOFError:
                ok, payload = False, "the process died without a result"
            if ok:
                results[rank] = payload
            else:
                failures[rank] = payload
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        raise RankFailure("\n".join(f"rank {rank} of {num_ranks}:\n{text}" for rank, text in sorted(failures.items())))
    if pending:
        stuck = "\n".join(f"rank {rank}:\n{_stack(folder, rank)}" for rank in sorted(pending.values()))
        raise RankFailure(f"ranks {sorted(pending.values())} of {num_ranks} did not finish in {timeout:g} s\n{stuck}")
    return results


def _stack(folder: Path, rank: int) -> str:
    path = folder / f"stack.{rank}"
    return (path.read_text() if path.exists() else "") or "no stack was written"


def _rank_main(
    sender: Connection,
    module: str,
    source: str,
    name: str,
    payload: bytes,
    folder: str,
    rank: int,
    num_ranks: int,
    timeout: float,
    backend: str,
) -> None:
    """Body of a rank: joins the group, runs the function, sends ``(ok, result or traceback)``."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), OMP_NUM_THREADS="1")
    # The host name need not resolve in a sandbox.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with open(Path(folder) / f"stack.{rank}", "w") as stack:
        faulthandler.dump_traceback_later(max(timeout - 1.0, 0.5), file=stack)
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout),
            )
            args, kwargs = pickle.loads(payload)
            result = getattr(_load(module, source), name)(*args, **kwargs)
            message = pickle.dumps((True, _detached(result)))
            # A rank that leaves first would break collectives that others are still in.
            dist.barrier()
        except BaseException:  # whatever ended the rank is the test's to see
            message = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    sender.send_bytes(message)
    sender.close()
    if pickle.loads(message)[0]:
        dist.destroy_process_group()
    # Threads of a broken group may never end.
    os._exit(0)


def _load(module: str, source: str) -> Any:
    """The module that holds the test function; by file, since pytest's importlib mode names modules its own way."""
    if module in sys.modules and module != "__main__":
        return sys.modules[module]
    name = "rank_main" if module == "__main__" else module
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _detached(value: Any) -> Any:
    """``value`` with its tensors cut from autograd and copied (a view would pickle its whole storage)."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)
