"""The counter sees our collectives, and those that PyTorch's own engines issue."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autopar.ir.mesh import Mesh
from autopar.ir.primitives import collectives
from autopar.ir.primitives.collective_counter import CollectiveCounter, Issued
from tests.harness import run_ranks
from tests.ir.layouts import axis_groups


def _mlp(x: Tensor, up: Tensor, down: Tensor, group: str, *, sequence: bool) -> Tensor:
    if sequence:
        h = collectives.all_gather(x, dim=1, group=group, backward="reduce_scatter")
        return collectives.reduce_scatter(torch.relu(h @ up) @ down, dim=1, group=group)
    h = collectives.identity(x, group=group)
    return collectives.all_reduce(torch.relu(h @ up) @ down, group=group)


def _count_mlp() -> list[tuple[str, list[Issued]]]:
    group = axis_groups(Mesh.of(tp=2))["tp"]
    up, down = torch.randn(8, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    found = []
    for sequence, length in ((False, 4), (True, 2)):
        x = torch.randn(2, length, 8, requires_grad=True)
        with CollectiveCounter() as counter:
            _mlp(x, up, down, group, sequence=sequence).sum().backward()  # type: ignore[no-untyped-call]
        found.append((str(counter), counter.issued))
    return found


def test_tensor_parallel_mlp() -> None:
    for plain, sequence in run_ranks(_count_mlp, 2):
        assert plain[0] == "forward: 1 all_reduce; backward: 1 all_reduce"
        assert sequence[0] == "forward: 1 all_gather, 1 reduce_scatter; backward: 1 all_gather, 1 reduce_scatter"
        assert {one.payload_bytes for one in (*plain[1], *sequence[1])} == {2 * 4 * 8 * 4}
        assert sum(one.sent_bytes for one in plain[1]) == sum(one.sent_bytes for one in sequence[1]) == 2 * 256


def _count_engines() -> list[list[Issued]]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    with CollectiveCounter() as fsdp:
        sharded(torch.randn(2, 8)).sum().backward()
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(8, 8, bias=False))
    with CollectiveCounter() as ddp:
        replicated(torch.randn(2, 8)).sum().backward()
    rank = dist.get_rank()
    with CollectiveCounter() as pipeline:
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
        dist.barrier()
    return [fsdp.issued, ddp.issued, pipeline.issued]


def test_sharded_replicated_and_pipelined_engines() -> None:
    ranks = run_ranks(_count_engines, 2)
    for rank, (fsdp, ddp, pipeline) in enumerate(ranks):
        assert Counter((one.kind, one.phase) for one in fsdp) == {
            ("all_gather", "forward"): 2,
            ("all_gather", "backward"): 2,
            ("reduce_scatter", "backward"): 2,
        }
        assert [(one.kind, one.phase, one.payload_bytes, one.group_size) for one in ddp] == [
            ("all_reduce", "backward", 256, 2)
        ]
        # ZeRO-3 moves 1.5 times what data parallelism moves.
        assert sum(one.sent_bytes for one in fsdp) == 2 * 1.5 * sum(one.sent_bytes for one in ddp)
        assert [(one.kind, one.peer) for one in pipeline] == [("recv" if rank else "send", 1 - rank), ("barrier", None)]
