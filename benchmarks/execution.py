"""Step time of autopar against PyTorch's own engines, at the same strategy, on a 60M-parameter Llama in float32.

    python benchmarks/execution.py [--rows one,dp2,zero3,tp2,pp2] [--rounds 7] [--profile FOLDER]

Both sides train the same model on the same data in one process group; their steps alternate, so that whatever
else the machine does meets both. The table gives the median of the per-round ratios autopar / peer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import autopar

ROWS = 4
SEQ = 128
MICROBATCHES = 4

# Row -> ranks, constraints, peer, limit on the ratio.
TABLE: dict[str, tuple[int, dict[str, Any], str, float]] = {
    "one": (1, {}, "the plain model", 1.05),
    "dp2": (2, {"dp": 2, "zero": 0, "num_microbatches": 1}, "DistributedDataParallel", 1.05),
    "zero3": (2, {"dp": 2, "zero": 3, "num_microbatches": 1}, "FSDP2 fully_shard", 1.05),
    "tp2": (2, {"tp": 2, "sp": False, "num_microbatches": 1}, "parallelize_module (DTensor)", 0.9),
    "pp2": (2, {"pp": 2, "num_microbatches": MICROBATCHES, "schedule": "1f1b"}, "hand-split 1F1B", 1.05),
}

Step = Callable[[], float]


def build() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def tokens() -> Tensor:
    return torch.randint(0, 32000, (ROWS, SEQ), generator=torch.Generator().manual_seed(7))


def autopar_step(ranks: int, constraints: dict[str, Any]) -> Step:
    batch = {"input_ids": tokens(), "labels": tokens()}
    parallel = autopar.parallelize(build(), ranks, example_inputs=batch, remat="none", **constraints)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    mine = parallel.shard_batch(batch)

    def step() -> float:
        optimizer.zero_grad()
        loss = parallel.step(**mine)
        optimizer.step()
        return float(loss)

    return step


def _loop(model: nn.Module, batch: Tensor, *, mean_over: int = 1) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        value = loss.detach()
        if mean_over > 1:
            dist.all_reduce(value)
        return float(value) / mean_over

    return step


def peer_one() -> Step:
    return _loop(build(), tokens())


def peer_dp2() -> Step:
    model = nn.parallel.DistributedDataParallel(build(), gradient_as_bucket_view=True)
    return _loop(model, tokens().chunk(2)[dist.get_rank()], mean_over=2)


def peer_zero3() -> Step:
    from torch.distributed.fsdp import fully_shard

    model = build()
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return _loop(model, tokens().chunk(2)[dist.get_rank()], mean_over=2)


def peer_tp2() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layer in model.model.layers:  # type: ignore[union-attr]
        styles = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
        styles |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        styles |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}  # type: ignore[dict-item]
        parallelize_module(layer, mesh, styles)
    return _loop(model, tokens())


class _Half(nn.Module):
    """One of two pipeline stages of a Llama, split by hand."""

    def __init__(self, model: Any, stage: int) -> None:
        super().__init__()
        layers = model.model.layers
        half = len(layers) // 2
        self.embed = model.model.embed_tokens if stage == 0 else None
        self.layers = nn.ModuleList(layers[:half] if stage == 0 else layers[half:])
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if stage == 1 else None
        self.head = model.lm_head if stage == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def peer_pp2() -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    half = _Half(build(), rank)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    batch = tokens()

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        optimizer.step()
        value = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(value, src=1)
        return float(value)

    return step


PEERS: dict[str, Callable[[], Step]] = {
    "one": peer_one,
    "dp2": peer_dp2,
    "zero3": peer_zero3,
    "tp2": peer_tp2,
    "pp2": peer_pp2,
}


def _timed(step: Step) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    dist.barrier()
    return time.perf_counter() - start, loss


def _worker(rank: int, row: str, world: int, rounds: int, folder: str, profile: str | None) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    _, constraints, peer, limit = TABLE[row]
    mine, theirs = autopar_step(world, constraints), PEERS[row]()
    for _ in range(2):
        _timed(mine)
        _timed(theirs)
    pairs = []
    for number in range(rounds):
        order = (mine, theirs) if number % 2 == 0 else (theirs, mine)
        results = {id(step): _timed(step) for step in order}
        pairs.append((results[id(mine)], results[id(theirs)]))
    if profile:
        for name, step in (("autopar", mine), ("peer", theirs)):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
                step()
            record.export_chrome_trace(f"{profile}/{row}_{name}_{rank}.json")
            if rank == 0:
                text = record.key_averages().table(sort_by="self_cpu_time_total", row_limit=18)
                print(f"{row} {name}\n{text}", flush=True)
    if rank == 0:
        ratio = statistics.median(a[0] / b[0] for a, b in pairs)
        times = [statistics.median(p[side][0] for p in pairs) for side in (0, 1)]
        difference = abs(pairs[-1][0][1] - pairs[-1][1][1])
        verdict = "met" if ratio <= limit else "MISSED"
        seconds = f"{times[0]:.3f} s | {times[1]:.3f} s"
        print(f"| {row} | {peer} | {seconds} | {ratio:.3f} | {limit} {verdict} | {difference:.1e} |", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(TABLE))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", help="folder for traces of one step of each side")
    options = parser.parse_args()
    if options.profile:
        os.makedirs(options.profile, exist_ok=True)
    print(
        "| plan | peer | autopar | peer's | ratio | limit | loss difference |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for row in options.rows.split(","):
        world = TABLE[row][0]
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_worker, args=(row, world, options.rounds, folder, options.profile), nprocs=world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
