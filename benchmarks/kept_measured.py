"""What blocks of eight models keep for backward, and how long they compute it again: predicted and measured on a CPU.

    python benchmarks/kept_measured.py [--models llama,t5] [--rounds 7]

Each model trains on one rank, in float32, with all blocks at each set of its frontier in turn. Bytes are those that
tensors hold after a forward. Seconds of recomputation are measured in two ways, each the median over rounds in which
the plans take turns: those that a step spends in it, and those that a step takes longer than one with everything kept.
The first leave out what the forward takes longer, since it notes what is kept, and so does the prediction beside them;
the second are lost in what two steps differ by anyway where they are few. Seconds are predicted with the rates that
``autopar profile`` measures, before the rounds of each model, amid and after them, as a shared machine is faster in one
quarter of an hour than in the next: the median of the three predictions; or with those of ``--cluster FILE``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.cost_model.cluster_file import cluster_from_yaml
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.graph import CapturedModel
from autopar.profiling.profile import profile
from autopar.runtime import recomputation
from autopar.runtime.launch import ensure_process_group
from autopar.search.api import predict_plan
from tests.runtime.held import kept_by_a_step
from tests.runtime.kept_plans import plans_that_keep

# Blocks are as wide as those of the smallest published model of their kind, but for Llama, Qwen3 and Mixtral: of those
# the smallest are too wide to train in seconds. There are fewer of them, and a small vocabulary. A step takes a second
# or two: of 0.3 s, as ConvNeXt has of eight images, up to a third of what recomputation takes is Python.
ROWS, LENGTH, WIDTH, HEADS, DEPTH, VOCABULARY = 4, 256, 768, 12, 2, 1024
Inputs = dict[str, Tensor]
# By what a step takes longer, sets are counted whose share of it is this: less is lost in what a machine does besides.
LONGER, NEAR = 0.1, 0.15


def tokens() -> Inputs:
    drawn = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    return {"input_ids": drawn, "labels": drawn}


def images(count: int) -> Inputs:
    generator = torch.Generator().manual_seed(7)
    return {
        "pixel_values": torch.randn(count, 3, 64, 64, generator=generator),
        "labels": torch.randint(0, 10, (count,), generator=generator),
    }


def decoder(kind: str, **others: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False, **others,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=64, d_ff=4 * WIDTH, num_layers=DEPTH, num_heads=HEADS,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        image_size=64, patch_size=4, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(
        depths=[1, 1, 3, 1], hidden_sizes=[96, 192, 384, 768], image_size=64, num_labels=10, patch_size=2
    )
    return transformers.ConvNextForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "llama": (lambda: decoder("Llama"), tokens),
    "gpt2": (gpt2, tokens),
    "qwen3": (lambda: decoder("Qwen3", head_dim=64), tokens),
    "mixtral": (lambda: decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2), tokens),
    "bert": (bert, tokens),
    "t5": (t5, tokens),
    "vit": (vit, lambda: images(8)),
    "convnext": (convnext, lambda: images(32)),
}


def trained(name: str, plan: Any, batch: Inputs) -> Any:
    torch.manual_seed(0)
    return autopar.parallelize(MODELS[name][0]().train(), 1, example_inputs=batch, plan=plan)


@contextmanager
def timed_recomputation() -> Iterator[list[float]]:
    """The list gets the seconds of each recomputation of a block."""
    spent: list[float] = []
    recompute = recomputation._Call.recompute

    def timed(call: recomputation._Call) -> None:
        start = time.perf_counter()
        recompute(call)
        spent.append(time.perf_counter() - start)

    with patch.object(recomputation._Call, "recompute", timed):
        yield spent


class Errors(NamedTuple):
    """Predicted seconds over measured ones, less 1: in recomputation, of all sets; of what a step takes longer, of
    those that make it longer by ``LONGER``."""

    inside: list[float]
    longer: list[float]


class Predicted(NamedTuple):
    """Seconds of a plan's backward and of its step, the median over profiles of the machine."""

    backward_s: float
    step_s: float

    @classmethod
    def of(cls, captured: CapturedModel, clusters: list[Cluster], plan: Any) -> Predicted:
        each = [predict_plan(captured, cluster, plan) for cluster in clusters]
        seconds = zip(*((sum(own.backward_s), own.step_time_s) for own in each), strict=True)
        return cls(*map(statistics.median, seconds))


def rows(name: str, cluster_now: Callable[[], Cluster], rounds: int) -> tuple[list[str], Errors]:
    """Lines of the table, and the errors."""
    cluster = cluster_now()
    clusters = [cluster]
    batch = MODELS[name][1]()
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    plan = autopar.search(model, cluster, example_inputs=batch, num_microbatches=1, remat="none")
    first = trained(name, plan, batch)
    plans = {"everything": plan} | plans_that_keep(plan, first.engine.captured, cluster)
    every = {kept: trained(name, own, batch) for kept, own in plans.items()}
    kept_bytes = {kept: predict_plan(first.engine.captured, cluster, own).kept_bytes[0] for kept, own in plans.items()}
    held = {}
    gradients = {}
    for kept, parallel in every.items():
        parallel.step(**batch)
        parallel.zero_grad()
        held[kept] = kept_by_a_step(parallel, batch)
        gradients[kept] = parallel.full_gradients()
    for kept, own in gradients.items():
        assert all(torch.equal(own[key], value) for key, value in gradients["everything"].items()), kept
    seconds: dict[str, list[float]] = {kept: [] for kept in every}
    inside: dict[str, list[float]] = {kept: [] for kept in every}
    for turn in range(rounds + 1):
        if turn == rounds // 2 + 1:
            clusters.append(cluster_now())
        for kept in every if turn % 2 else reversed(every):
            start = time.perf_counter()
            with timed_recomputation() as spent:
                every[kept].step(**batch)
            if turn:
                seconds[kept].append(time.perf_counter() - start)
                inside[kept].append(sum(spent))
    clusters.append(cluster_now())
    predicted = {kept: Predicted.of(first.engine.captured, clusters, own) for kept, own in plans.items()}
    found, errors, whole_s = [], Errors([], []), statistics.median(seconds["everything"])
    for kept in every:
        recomputed_s = predicted[kept].backward_s - predicted["everything"].backward_s
        wanted = predicted[kept].step_s - predicted["everything"].step_s
        share = held[kept] / kept_bytes[kept] - 1
        cells = f"{kept_bytes[kept] / 2**20:.1f} | {held[kept] / 2**20:.1f} | {share:+.1%}"
        times = "| | | | |"
        if kept != "everything":
            spent_s = statistics.median(inside[kept])
            longer_s = statistics.median(a - b for a, b in zip(seconds[kept], seconds["everything"], strict=True))
            errors.inside.append(recomputed_s / spent_s - 1)
            if longer_s > LONGER * whole_s:
                errors.longer.append(wanted / longer_s - 1)
            both = ((recomputed_s, spent_s), (wanted, longer_s))
            times = " | ".join(f"{1e3 * said:.1f} | {1e3 * took:.1f} | {said / took - 1:+.0%}" for said, took in both)
        whole = f"{1e3 * predicted[kept].step_s:.0f} | {1e3 * statistics.median(seconds[kept]):.0f}"
        found.append(f"| {name} | {kept} | {cells} | {times} | {whole} |")
    return found, errors


def summary(errors: list[float], which: str) -> str:
    """How many of the sets are near, and the furthest of them."""
    near = sum(abs(error) <= NEAR for error in errors)
    return (
        f"{which}: {near} of {len(errors)} sets are predicted within {NEAR:.0%}; the furthest is "
        f"{max(errors, key=abs):+.0%}, the median {statistics.median(errors):+.0%} off."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cluster", type=Path, help="cluster file to predict with, instead of measuring")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ensure_process_group()
    print("| model | kept | MiB predicted | measured | error | ms of recomputation, predicted ", end="")
    print("| measured | error | ms a step longer, predicted | measured | error | ms a step, predicted | measured |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    errors = Errors([], [])

    def cluster_now() -> Cluster:
        if given.cluster is not None:
            return cluster_from_yaml(given.cluster.read_text())
        return profile(lambda _: None).cluster

    for name in given.models.split(","):
        lines, own = rows(name, cluster_now, given.rounds)
        print(*lines, sep="\n", flush=True)
        for known, found in zip(errors, own, strict=True):
            known += found
    print("", summary(errors.inside, "In recomputation"), sep="\n")
    if errors.longer:
        print(summary(errors.longer, f"Steps longer by {LONGER:.0%}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
