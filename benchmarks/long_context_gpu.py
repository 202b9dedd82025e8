"""Long sequences on one GPU: a few layers of Llama-3-8B, step time and peak memory predicted and measured.

    python benchmarks/long_context_gpu.py [--layers 4] [--seq 8192,16384,32768,65536,131072] [--remat full]
                                          [--seconds 220]

Each length is planned for this one GPU as the catalogue has it, without a profile, and trained in bf16 with a fused
AdamW; the search chooses what is rematerialised. Where a rank has more logits than ``loss_chunks.LIMIT`` the loss is
computed in chunks; the first such lengths are run with all logits at once too, where that is predicted to fit, which
says what chunks cost. So are the first lengths whose wide layers are computed in tiles, which they are under full
rematerialisation (``--remat full``) from ``row_tiles.LIMIT`` numbers on. Seconds of planning include those in which
the parameters get their first values, on the host. Predicted bytes are without the share that the caching allocator
loses to fragmentation. No length is begun after ``--seconds``. ``--model tiny`` runs on one core; a CPU does not count
its peak.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.lowered import loss_chunks, row_tiles
from autopar.search.api import predict_plan

GIB = 2**30
UNTIMED, TIMED = 1, 3
# Lengths that are run with all logits at once too.
_COMPARED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model, and the logits of a chunk of its loss: as on a GPU, or few enough for a small test."""

    width: int
    inner: int
    heads: int
    groups: int
    vocabulary: int
    chunk: int = loss_chunks.CHUNK
    tile: int = row_tiles.TILE


SHAPES = {
    "8B": Shape(width=4096, inner=14_336, heads=32, groups=8, vocabulary=128_256),
    "tiny": Shape(width=128, inner=352, heads=4, groups=2, vocabulary=4096, chunk=1 << 19, tile=1 << 18),
}


@contextmanager
def pieces(shape: Shape, whole: str) -> Iterator[None]:
    """Losses in chunks and wide layers in tiles, from twice as many numbers on. whole: which of the two are not."""
    before = loss_chunks.LIMIT, loss_chunks.CHUNK, row_tiles.LIMIT, row_tiles.TILE
    loss_chunks.LIMIT, loss_chunks.CHUNK = (1 << 62 if whole == "loss" else 2 * shape.chunk), shape.chunk
    row_tiles.LIMIT, row_tiles.TILE = (1 << 62 if whole == "layers" else 2 * shape.tile), shape.tile
    try:
        yield
    finally:
        loss_chunks.LIMIT, loss_chunks.CHUNK, row_tiles.LIMIT, row_tiles.TILE = before


def trained(shape: Shape, layers: int, seq: int, remat: str | None, device: torch.device) -> str:
    """Cells of a row: how blocks are rematerialised, seconds, tokens a second, GiB. Raises InfeasiblePlan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.groups, max_position_embeddings=seq,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    cuda = device.type == "cuda"
    cluster = make_cluster("h100-sxm" if cuda else "cpu", 1, 1)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.randint(0, shape.vocabulary, (1, seq))
    batch = {"input_ids": tokens, "labels": tokens}
    started = time.perf_counter()
    parallel = autopar.parallelize(
        model, cluster, example_inputs=batch, precision="bf16" if cuda else "fp32", num_microbatches=1,
        **({} if remat is None else {"remat": remat}),
    )  # fmt: skip
    planned = time.perf_counter() - started
    predicted = predict_plan(parallel.engine.captured, cluster, parallel.plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5, fused=True)
    inputs, seconds = parallel.shard_batch(batch), []
    for number in range(UNTIMED + TIMED):
        if cuda and number == UNTIMED:
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        start = time.perf_counter()
        loss = parallel.step(**inputs)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    assert torch.isfinite(loss), f"the loss at {seq} tokens is {loss}"
    parts = predicted.memory[0].as_bytes()
    del parts["workspace"]
    measured = statistics.median(seconds[UNTIMED:])
    peak = torch.cuda.max_memory_allocated() if cuda else None
    remat = ", ".join(f"{level} {count}" for level, count in parallel.plan.stages[0].remat.items() if count) or "none"
    cells = [
        remat, f"{planned:.1f}", f"{predicted.step_time_s:.3g}", f"{measured:.3g}",
        f"{predicted.step_time_s / measured - 1:+.1%}", f"{seq / measured:,.0f}", f"{sum(parts.values()) / GIB:.1f}",
        *((f"{peak / GIB:.1f}", f"{sum(parts.values()) / peak - 1:+.1%}") if peak else ("", "")),
    ]  # fmt: skip
    return " | ".join(cells)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def row(shape: Shape, layers: int, seq: int, remat: str | None, device: torch.device, *, whole: str = "") -> bool:
    """Print a row; whether it ran."""
    parts = [] if whole == "loss" or seq * shape.vocabulary <= 2 * shape.chunk else ["loss"]
    if remat == "full" and whole != "layers" and seq * shape.inner > 2 * shape.tile:
        parts.append("layers")
    how, ran = " and ".join(parts) or "nothing", True
    try:
        with pieces(shape, whole):
            cells = trained(shape, layers, seq, remat, device)
    except InfeasiblePlan as error:
        cells, ran = str(error).splitlines()[0], False
    except torch.OutOfMemoryError as error:
        cells, ran = f"out of memory: {str(error).splitlines()[0]}", False
    print(f"| {seq:,} | {how} | {cells} |", flush=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ran


def seq_of(width: int, numbers: int) -> int:
    """The longest sequence that is whole where each token has ``width`` numbers."""
    return 2 * numbers // width


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", default="8192,16384,32768,65536,131072")
    parser.add_argument("--remat", choices=["none", "selective", "full"], help="of all layers; searched unless given")
    parser.add_argument("--seconds", type=float, default=220.0, help="no length is begun after them")
    options = parser.parse_args()
    begun, cuda = time.perf_counter(), torch.cuda.is_available()
    if not cuda and options.model != "tiny":
        parser.error("no GPU here: --model tiny runs on one core")
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        print(f"{options.model}, {options.layers} layers, torch {torch.__version__}, "
              f"{torch.cuda.get_device_name() if cuda else 'one core'}\n")  # fmt: skip
        columns = ["sequence", "in pieces", "remat", "planned s", "predicted s", "measured s", "error", "tokens/s",
                   "predicted GiB", "peak GiB", "error"]  # fmt: skip
        print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
        shape, remat = SHAPES[options.model], options.remat
        compared = {"loss": seq_of(shape.vocabulary, shape.chunk), "layers": seq_of(shape.inner, shape.tile)}
        if remat != "full":
            del compared["layers"]
        done = dict.fromkeys(compared, 0)
        for seq in map(int, options.seq.split(",")):
            if time.perf_counter() - begun > options.seconds:
                print(f"\n{seq:,} tokens and more were left out: {options.seconds:.0f} s are over.")
                break
            if not row(shape, options.layers, seq, remat, device):
                break
            for whole, most in compared.items():
                if seq > most and done[whole] < _COMPARED:
                    done[whole] += 1
                    row(shape, options.layers, seq, remat, device, whole=whole)
        print(f"\n{time.perf_counter() - begun:.0f} s in all.")
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
