"""Runs a test function on several gloo ranks of this machine.

    def body(scale):                     # a module-level function; runs on every rank
        x = torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(x)
        return x * scale

    def test_sum():
        for result in run_ranks(body, 4, 2.0):
            assert result.tolist() == [12.0, 12.0]

Ranks are forked from a server that has imported torch and autopar once, so starting them takes a fraction of a second.
Nothing hangs: a rank that raises ends the others, and ranks that stand still or run in circles (``tests/patience.py``)
are killed, and the error shows where each one stood. No limit is one of the clock, which a loaded machine would pass.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
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

from tests.patience import Patience

# Seconds in which the other ranks may do nothing once one has failed: they fail by themselves, or are killed. So the
# first cause is reported.
_GRACE_S = 1.0
# What every rank would import: 5 s a rank, most of it in torch.export.
_PRELOADED = ["torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo", "torch.export", "autopar.api"]
# Collectives have no limit of their own: whoever waits in vain does nothing, which the test's process sees.
_COLLECTIVE = timedelta(days=1)


class RankFailure(AssertionError):
    """A rank raised, died or did not finish. The message holds the traceback of every such rank."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    idle_s: float = 60.0,
    limit_s: float = 600.0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on ``num_ranks`` processes of one group; returns the results by rank.

    ``function`` is defined at the top level of a module; arguments and results travel by pickle (tensors by
    value; results are detached). Each rank runs one thread, seeded with 0. Raises RankFailure: where a rank raises,
    where all do nothing for ``idle_s`` seconds, or where they use ``limit_s`` seconds of CPU time, each on average.
    """
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is not at the top level of a module, so ranks cannot import it")
    # Read by libraries when they start, so set before the server forks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    source = inspect.getsourcefile(function)
    assert source is not None
    payload = pickle.dumps((args, kwargs))

    with tempfile.TemporaryDirectory(prefix="autopar-ranks-") as folder:
        processes: list[ForkServerProcess] = []
        pending: dict[Connection, int] = {}
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                job = (function.__module__, source, function.__qualname__, payload, folder, rank, num_ranks, backend)
                process = context.Process(target=_rank_main, args=(sender, *job), daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                pending[receiver] = rank
            pids = [process.pid or 0 for process in processes]
            return _collect(pending, pids, idle_s, limit_s * num_ranks, Path(folder))
        finally:
            for process in processes:
                process.join(_GRACE_S if not pending else 0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pending: dict[Connection, int], pids: list[int], idle_s: float, limit_s: float, folder: Path) -> list[Any]:
    """Results by rank, or RankFailure."""
    num_ranks = len(pids)
    results: list[Any] = [None] * num_ranks
    failures: dict[int, str] = {}
    patience = Patience(pids, idle_s=idle_s, limit_s=limit_s)
    reason = None
    while pending and reason is None:
        finished = wait(list(pending), timeout=patience.pause_s)
        for ready in finished:
            assert isinstance(ready, Connection)
            rank = pending.pop(ready)
            try:
                ok, payload = pickle.loads(ready.recv_bytes())
            except EOFError:
                ok, payload = False, "the process died without a result"
            if ok:
                results[rank] = payload
            else:
                if not failures:
                    patience = Patience(pids, idle_s=_GRACE_S, limit_s=limit_s)
                failures[rank] = payload
        if not finished:
            reason = patience.lost()
    if failures:
        raise RankFailure("\n".join(f"rank {rank} of {num_ranks}:\n{text}" for rank, text in sorted(failures.items())))
    if pending:
        stuck = sorted(pending.values())
        stacks = "\n".join(f"rank {rank}:\n{_stack(folder, rank, pids[rank])}" for rank in stuck)
        raise RankFailure(f"ranks {stuck} of {num_ranks} did not finish: all of them {reason}\n{stacks}")
    return results


def _stack(folder: Path, rank: int, pid: int) -> str:
    """Where a rank stands: it writes that when it gets the signal, whatever it is doing."""
    path = folder / f"stack.{rank}"
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "the process has ended"
    for _ in range(50):
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return text
        time.sleep(0.1)
    return "no stack was written"


def _rank_main(
    sender: Connection,
    module: str,
    source: str,
    name: str,
    payload: bytes,
    folder: str,
    rank: int,
    num_ranks: int,
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
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=num_ranks,
                timeout=_COLLECTIVE,
            )
            args, kwargs = pickle.loads(payload)
            result = getattr(_load(module, source), name)(*args, **kwargs)
            message = pickle.dumps((True, _detached(result)))
            # A rank that leaves first would break collectives that others are still in.
            dist.barrier()
        except BaseException:  # whatever ended the rank is the test's to see
            message = pickle.dumps((False, traceback.format_exc()))
        faulthandler.unregister(signal.SIGUSR1)
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
