"""Packed documents on one GPU in bf16: memory by length of the row, tokens a second beside padded rows, and kernels.

    python benchmarks/packed_gpu.py [--lengths 4096,8192,16384,32768,65536] [--tiny]

The model has four layers of the sizes of Llama-3-8B and a vocabulary of 8,192, so that memory is that of layers rather
than of logits; it runs through ``autopar.parallelize`` on one rank, one program for all sizes. Lengths of documents are
log-normal. A packed step has one row of the documents; padded, the same documents run in batches of as many rows,
padded to the longest, as fit into as many positions. Each is a forward and a backward; the first one is not timed.

Attention within documents is one call of a variable-length kernel, or, "one by one", a kernel for every document, which
is the reference: their results and gradients are compared first. Last, the attention kernels that a packed step starts.
``--tiny`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
import autopar
from autopar.ir.ops import composite, varlen
from autopar.runtime.launch import this_device
from tests.ir.test_packed_order import documents_of, log_normal

GIB = 2**30
TIMED = 2
MEDIAN, SIGMA = 665.0, 1.5
ATTENTION = ("flash", "fmha", "attention", "sdpa")


def model_of(tiny: bool, longest: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = (64, 128, 4, 2, 256) if tiny else (4096, 14336, 32, 8, 8192)
    hidden, inner, heads, groups, vocabulary = sizes
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=longest, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with this_device():
        return LlamaForCausalLM(config)


def packed(lengths: list[int], vocabulary: int) -> dict[str, Tensor]:
    """One row, positions of which restart with each document, whose first token has no label."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens = torch.randint(0, vocabulary, positions.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100), "position_ids": positions}


def padded(lengths: list[int], most: int, vocabulary: int) -> Iterator[dict[str, Tensor]]:
    """The documents in order, a row each, in batches of at most ``most`` positions."""
    batches: list[list[int]] = [[]]
    for length in lengths:
        if (len(batches[-1]) + 1) * max([*batches[-1], length]) > most:
            batches.append([])
        batches[-1].append(length)
    for own in batches:
        positions = torch.arange(max(own)).expand(len(own), -1).contiguous()
        tokens = torch.randint(0, vocabulary, positions.shape, generator=torch.Generator().manual_seed(1))
        hidden = (positions == 0) | (positions >= torch.tensor(own)[:, None])
        yield {"input_ids": tokens, "labels": tokens.masked_fill(hidden, -100), "position_ids": positions}


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within it no variable-length kernel is there."""
    with mock.patch.object(varlen, "_kernel", lambda: None):
        yield


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured(parallel: Any, batches: list[dict[str, Tensor]], device: torch.device) -> tuple[float, float]:
    """Seconds of all batches, and the most bytes that tensors took, in GiB; memory is 0 where it is not counted."""
    inputs = [parallel.shard_batch(batch) for batch in batches]
    seconds = []
    for number in range(1 + TIMED):
        if number == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait(device)
        start = time.perf_counter()
        for batch in inputs:
            parallel.step(**batch)
            parallel.zero_grad()
        wait(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    return min(seconds[1:]), peak


def compare(device: torch.device) -> None:
    """Print how far one call is from a kernel for every document, in bf16: results and gradients."""
    documents = documents_of([log_normal(2048, 3), log_normal(2048, 4)]).to(device)
    for kind, window in (("causal", None), ("full", None), ("sliding", 128)):
        found = []
        for how in (nullcontext, one_by_one):
            generator = torch.Generator().manual_seed(0)
            q, k, v = (
                torch.randn(2, heads, 2048, 128, generator=generator).to(device, torch.bfloat16).requires_grad_()
                for heads in (8, 2, 2)
            )
            with how():
                taken = varlen.takes_documents(q, v, None, None, kind, 0.0)
                out = composite.attention(q, k, v, None, None, documents, kind=kind, window=window, scale=128**-0.5)
                out.square().sum().backward()
            found.append((out.detach(), q.grad, k.grad, v.grad, taken))
        errors = [
            float((one - other).float().norm() / other.float().norm())
            for one, other in zip(found[0][:4], found[1][:4], strict=True)
        ]
        shown = " ".join(f"{error:.1e}" for error in errors)
        print(
            f"{kind:<8} one call: {'yes' if found[0][4] else 'no'}; relative difference of result, dq, dk, dv: {shown}"
        )


def kernels(parallel: Any, batch: dict[str, Tensor], device: torch.device) -> str:
    """The attention kernels of a step and how often each is started."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        parallel.step(**parallel.shard_batch(batch))
        wait(device)
    parallel.zero_grad()
    counted = Counter(event.name for event in trace.events() if any(word in event.name.lower() for word in ATTENTION))
    return "\n".join(f"  {count:5} {name[:110]}" for name, count in counted.most_common(8))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536")
    parser.add_argument("--tiny", action="store_true", help="a small model, in float32, on a CPU")
    options = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    on_gpu = torch.cuda.is_available() and not options.tiny
    lengths = [int(length) for length in options.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        run(this_device(), lengths, options.tiny)
        dist.destroy_process_group()
    return 0


def run(device: torch.device, lengths: list[int], tiny: bool) -> None:
    """Print the tables."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}\n")
    compare(device)
    model = model_of(tiny, max(lengths))
    vocabulary = model.config.vocab_size
    row = packed(log_normal(min(lengths), 0, MEDIAN, SIGMA), vocabulary)
    example = {key: tensor.repeat(2, 1) for key, tensor in row.items()}
    precision = {} if tiny else {"precision": "bf16"}
    parallel = autopar.parallelize(model, 1, example_inputs=example, num_microbatches=1, remat="selective", **precision)
    del model
    print(
        f"\n{'row':>6} {'documents':>10} {'batch':<12} {'positions':>10} {'seconds':>8} {'tokens/s':>9} {'peak GiB':>9}"
    )
    peaks: dict[int, float] = {}
    for length in lengths:
        own = log_normal(length, 0, MEDIAN, SIGMA)
        rows = {"packed": [packed(own, vocabulary)], "one by one": [packed(own, vocabulary)]}
        rows["padded"] = list(padded(own, length, vocabulary))
        for kind, batches in rows.items():
            try:
                with one_by_one() if kind == "one by one" else nullcontext():
                    seconds, peak = measured(parallel, batches, device)
            except torch.OutOfMemoryError:
                print(f"{length:6} {len(own):10} {kind:<12} out of memory", flush=True)
                continue
            positions = sum(batch["input_ids"].numel() for batch in batches)
            shown = f"{length:6} {len(own):10} {kind:<12} {positions:10} {seconds:8.3f} {length / seconds:9.0f}"
            print(f"{shown} {peak:9.2f}", flush=True)
            if kind == "packed":
                peaks[length] = peak
    if len(peaks) > 2:
        (short, low), *_, (long, high) = peaks.items()
        slope = (high - low) / (long - short)
        off = max(abs(peak - low - slope * (length - short)) for length, peak in peaks.items())
        print(f"\npeak of packed rows: {slope * 2**20:.1f} KiB a position; at most {off:.2f} GiB off a straight line")
    longest = packed(log_normal(max(peaks, default=min(lengths)), 0, MEDIAN, SIGMA), vocabulary)
    print(f"\nattention kernels of a packed step:\n{kernels(parallel, longest, device)}")
    with one_by_one():
        print(f"one by one:\n{kernels(parallel, longest, device)}")


if __name__ == "__main__":
    sys.exit(main())
