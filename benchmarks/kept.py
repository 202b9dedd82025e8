"""What the blocks of ten models may keep for backward: the frontier of all sets beside the four levels, as predicted.

    python benchmarks/kept.py [--models llama3-70b,resnet50] [--plot kept.html]

Of the block that a model has most often, on eight H100, one microbatch of a rank: bytes kept and seconds of
recomputation at each level, the least seconds of a corner of the frontier that keeps no more, and those of the line
between corners, which blocks of a stage at two sets have in the mean. Everything kept is a corner, too. Levels that lie
below the line are counted. The plot has all corners.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.memory.kept_frontier import KeptSet, frontier
from autopar.ir.capture.capture import capture
from autopar.ir.rematerialisation import LEVELS
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, priced_plan
from autopar.search.pricing.block_moves import layouts_of
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.pricing.kept_graph import kept_graph
from autopar.search.problem.constraints import Constraints

EXAMPLES = Path(__file__).parents[1] / "examples"
GPUS, ENOUGH, MIB = 8, 1 << 50, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """sizes: rows, and their tokens if they are tokens. plan: constraints."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    plan: dict[str, Any]


def of_example(name: str, rows: int, length: int, **plan: Any) -> Case:
    source = load_model_file(str(EXAMPLES / name))
    return Case(model=source.meta_model, inputs=lambda: source.meta_inputs(rows, length), plan=plan)


def of_tokens(model: Callable[[], nn.Module], rows: int, length: int, **plan: Any) -> Case:
    def inputs() -> dict[str, Tensor]:
        tokens = torch.zeros((rows, length), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return Case(model=model, inputs=inputs, plan=plan)


def bert_large() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    )


def t5_large() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, use_cache=False, decoder_start_token_id=0
        )
    )


def vit_large() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    )


def convnext_large() -> nn.Module:
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=[192, 384, 768, 1536])
    )


def images(rows: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: of_example("gpt.py", 64, 1024, dp=4, tp=2),
    "llama3-8b": lambda: of_example("llama3_8b.py", 8, 8192, dp=4, tp=2, sequence_parallel=True),
    "llama3-70b": lambda: of_example("llama3_70b.py", 1, 8192, tp=8, sequence_parallel=True),
    "mixtral-8x7b": lambda: of_example("mixtral_8x7b.py", 8, 4096, ep=8),
    "qwen3-30b": lambda: of_example("qwen3_30b_a3b.py", 8, 4096, ep=8),
    "bert-large": lambda: of_tokens(bert_large, 64, 512, dp=8),
    "t5-large": lambda: of_tokens(t5_large, 64, 512, dp=8),
    "vit-large": lambda: Case(model=vit_large, inputs=images(512), plan={"dp": 8}),
    "convnext-large": lambda: Case(model=convnext_large, inputs=images(512), plan={"dp": 8}),
    "resnet50": lambda: of_example("resnet50.py", 1024, 1, dp=8),
}


@dataclass(frozen=True, slots=True)
class Found:
    """levels: bytes and seconds of each."""

    block: str
    levels: list[tuple[float, float]]
    corners: list[KeptSet]
    seconds: float


def found(name: str) -> Found:
    case = CASES[name]()
    with torch.device("meta"):
        model, inputs = case.model(), case.inputs()
    captured = normalise(capture(model, inputs, name=name))
    cluster = make_cluster("h100-sxm", GPUS)
    constraints = Constraints(precision="bf16", num_microbatches=1, pp=1, **case.plan)
    plan = estimate_captured(captured, cluster.with_memory(ENOUGH), constraints).plan
    pricing, assignment, stages = priced_plan(captured, cluster, plan)
    repetition = pricing.workload.repetition
    kind = max(range(len(repetition.kinds)), key=lambda kind: repetition.kinds[kind].repeats)
    block = next(block for block in repetition.blocks if block.kind == kind)
    price = evaluate_stages(pricing, assignment, stages).blocks[block.index]
    start = time.perf_counter()
    corners = frontier(kept_graph(pricing, layouts_of(pricing.workload, assignment), kind))
    seconds = time.perf_counter() - start
    return Found(
        block.name,
        list(zip(price.saved_bytes, (own.total_s for own in price.recomputed), strict=True)),
        corners,
        seconds,
    )


def on_line(one: Found, num_bytes: float) -> float:
    """Seconds of recomputation, in the mean, of blocks at two corners that keep so many bytes in the mean."""
    points = [*((corner.num_bytes, corner.seconds) for corner in one.corners), one.levels[0]]
    least = min(seconds for size, seconds in points if size <= num_bytes)
    between = (
        first + (second - first) * (num_bytes - small) / (large - small)
        for small, first in points
        for large, second in points
        if small < num_bytes < large
    )
    return min([least, *between])


def row(name: str, one: Found) -> tuple[str, list[str]]:
    """A line of the table, and the levels that lie below the line between corners."""
    cells, below = [], []
    for level, (num_bytes, seconds) in zip(LEVELS, one.levels, strict=True):
        # A level's bytes are sums of shares, the frontier's are rounded.
        room = num_bytes * 1.001 + max(len(corner.kept) for corner in one.corners)
        least = min(corner.picoseconds for corner in one.corners if corner.num_bytes <= room)
        line = on_line(one, room)
        cells.append(f"{num_bytes / MIB:,.0f}: {1e6 * seconds:,.0f}, {least / 1e6:,.0f}, {1e6 * line:,.0f}")
        if line > 1.001 * seconds + 1e-9:
            below.append(f"{name} {level}")
    return f"| {name} | {one.block} | {' | '.join(cells)} | {len(one.corners)} | {one.seconds:.2f} |", below


def plot(path: Path, every: dict[str, Found]) -> None:
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=-(-len(every) // 2),
        cols=2,
        vertical_spacing=0.07,
        subplot_titles=[f"{n}: {f.block}" for n, f in every.items()],
    )
    for number, one in enumerate(every.values()):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        first = {"showlegend": number == 0}
        figure.add_scatter(
            x=[corner.num_bytes / MIB for corner in one.corners],
            y=[corner.picoseconds / 1e6 for corner in one.corners],
            mode="lines+markers", name="frontier", legendgroup="frontier", line={"color": "#1f6f8b"}, **first, **place,
        )  # fmt: skip
        figure.add_scatter(
            x=[num_bytes / MIB for num_bytes, _ in one.levels], y=[1e6 * seconds for _, seconds in one.levels],
            mode="markers+text", text=list(LEVELS), textposition=["top left", "top right", "top right", "middle right"],
            cliponaxis=False, name="levels", legendgroup="levels", marker={"color": "#c8553d", "size": 9}, **first,
            **place,
        )  # fmt: skip
        figure.update_xaxes(title_text="MiB kept of a microbatch", **place)
        figure.update_yaxes(title_text="µs of recomputation", **place)
    figure.update_layout(height=260 * -(-len(every) // 2), title="What a block may keep for backward, as predicted")
    figure.write_html(path, include_plotlyjs=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--plot", type=Path, help="page to write")
    options = parser.parse_args()
    print("MiB kept: µs of recomputation at the level, at a corner that keeps no more, on the line between corners\n")
    print(f"| model | block | {' | '.join(LEVELS)} | corners | s |")
    print("|---|---|---|---|---|---|---|---|")
    every = {}
    below: list[str] = []
    for name in options.models.split(","):
        every[name] = found(name)
        line, own = row(name, every[name])
        print(line, flush=True)
        below += own
    count = len(every) * len(LEVELS)
    print(f"\n{count - len(below)} of {count} levels lie on the line or above it{': not ' if below else ''}", end="")
    print(", ".join(below))
    if options.plot:
        plot(options.plot, every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
