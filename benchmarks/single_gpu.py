"""Step time and peak memory of Llama-style models on one GPU, predicted and measured.

    python benchmarks/single_gpu.py [--models 1B,3B] [--seq 1024,2048,4096] [--remat none,selective,full] [--rows 2]

The device is profiled first, as by ``autopar profile``. Each combination has a process of its own, trains in bf16 with
a fused AdamW, and reports the median of its steps and the most bytes that its tensors took. Predicted bytes are
without the share that the caching allocator loses to fragmentation, which is no part of that. A combination that is
predicted not to fit is left out. Where there is no GPU, ``--models 60M`` runs on one core; a CPU's memory has
``memory.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopar
from autopar.cost_model.cluster_file import cluster_from_dict
from autopar.ir.errors import InfeasiblePlan
from autopar.profiling.profile import profile
from autopar.runtime.launch import this_device
from autopar.search.api import predict_plan

GIB = 2**30
UNTIMED, TIMED = 3, 9

# Width, inner width, layers, heads, key and value heads, vocabulary. 1B and 3B are as Llama-3.2.
SHAPES = {
    "60M": (512, 1376, 8, 8, 8, 32_000),
    "1B": (2048, 8192, 16, 32, 8, 128_256),
    "3B": (3072, 8192, 28, 24, 8, 128_256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run. rows: samples of a step."""

    model: str
    seq: int
    remat: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Seconds of a step and bytes at its peak. peak: None where the device does not count them."""

    predicted_s: float
    measured_s: float
    predicted_bytes: int
    peak: int | None


def profiled() -> dict[str, Any]:
    """A cluster of this device alone."""
    return profile(lambda doing: print(f"  {doing}", file=sys.stderr)).description


def trained(cell: Cell, description: dict[str, Any]) -> Found | str:
    """What was found, or the first line of why the run does not fit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, layers, heads, groups, vocabulary = SHAPES[cell.model]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=cell.seq,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    device = this_device()
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config)
    tokens = torch.randint(0, vocabulary, (cell.rows, cell.seq))
    batch = {"input_ids": tokens, "labels": tokens}
    cluster = cluster_from_dict(description)
    pinned = {"remat": cell.remat, "precision": "bf16", "num_microbatches": 1}
    try:
        parallel = autopar.parallelize(model, cluster, example_inputs=batch, **pinned)
    except InfeasiblePlan as error:
        return str(error).splitlines()[0]
    del model
    optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
    inputs, seconds = parallel.shard_batch(batch), []
    for number in range(UNTIMED + TIMED):
        if number == UNTIMED and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        start = time.perf_counter()
        parallel.step(**inputs)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    predicted = predict_plan(parallel.engine.captured, cluster, parallel.plan)
    parts = predicted.memory[0].as_bytes()
    del parts["workspace"]
    return Found(
        predicted_s=predicted.step_time_s,
        measured_s=statistics.median(seconds[UNTIMED:]),
        predicted_bytes=sum(parts.values()),
        peak=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _alone(_: int, cell: Cell | None, description: dict[str, Any], folder: str) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    found = profiled() if cell is None else trained(cell, description)
    Path(folder, "found.json").write_text(json.dumps(asdict(found) if isinstance(found, Found) else found))
    dist.destroy_process_group()


def in_a_process(cell: Cell | None = None, description: dict[str, Any] | None = None) -> Any:
    """A ``Found``'s fields or a reason; without a cell the description of the device."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_alone, args=(cell, description or {}, folder), nprocs=1, start_method="spawn")
        return json.loads(Path(folder, "found.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1B,3B", help=", ".join(SHAPES))
    parser.add_argument("--seq", default="1024,2048,4096")
    parser.add_argument("--remat", default="none,selective,full")
    parser.add_argument("--rows", type=int, default=2, help="samples of a step")
    options = parser.parse_args()
    models = options.models.split(",")
    if unknown := [name for name in models if name not in SHAPES]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(SHAPES)}")
    if not torch.cuda.is_available() and models != ["60M"]:
        parser.error("no GPU here: --models 60M runs on one core")
    description = in_a_process()
    print(f"\n{json.dumps(description)}\n")
    print("| model | sequence | remat | predicted s | measured s | error | predicted GiB | peak GiB | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {"step time": [], "peak memory": []}
    for model in models:
        for seq in map(int, options.seq.split(",")):
            for remat in options.remat.split(","):
                cell = Cell(model=model, seq=seq, remat=remat, rows=options.rows)
                answer = in_a_process(cell, description)
                if isinstance(answer, str):
                    print(f"| {model} | {seq} | {remat} | {answer} |" + " |" * 5, flush=True)
                else:
                    print(f"| {model} | {seq} | {remat} | {_cells(Found(**answer), errors)} |", flush=True)
    for what, own in errors.items():
        if own:
            sizes = [abs(error) for error in own]
            print(f"\n{what}: median of absolute {statistics.median(sizes):.1%}, worst {max(own, key=abs):+.1%}.")
    return 0


def _cells(found: Found, errors: dict[str, list[float]]) -> str:
    pairs: tuple[tuple[str, float, float | None], ...]
    pairs = (
        ("step time", found.predicted_s, found.measured_s),
        ("peak memory", found.predicted_bytes / GIB, found.peak and found.peak / GIB),
    )
    cells = []
    for what, predicted, measured in pairs:
        if measured is None:
            cells += [f"{predicted:.3g}", "", ""]
        else:
            errors[what].append(predicted / measured - 1)
            cells += [f"{predicted:.3g}", f"{measured:.3g}", f"{errors[what][-1]:+.1%}"]
    return " | ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
