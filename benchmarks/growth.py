"""How the time of a search grows with the depth of a model and with the number of GPUs.

    python benchmarks/growth.py [--layers 8,16,32,64,128] [--gpus 8,64,96,256,...] [--plot growth.html]

A decoder as wide as Llama-3-8B is captured once for every depth. Each search has a process of its own, so that nothing
is known from the one before; capture and the analysis of the captured graph are not counted, they are printed beside.
A deeper model can have pipelines of more stages, and takes more memory, so that more has to be tried until it fits. So
every depth is searched once more with what all of them can have: eight stages under 1F1B, on devices whose memory is
in proportion to the depth. The plot has the curves of all, that of GPUs by the number of their divisors, which are the
degrees that pipelines and axes can have. No GPU is needed.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from autopar.cost_model.catalogue import make_cluster
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints, divisors
from autopar.search.problem.workload import Workload

BATCH, SEQ = 2048, 8192
# Where the other one varies.
LAYERS, GPUS = 32, 256
STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One search. staged_s: of another one, with ``STAGES`` stages and memory in proportion.

    step_s: of the plan that the first found.
    """

    layers: int
    gpus: int
    capture_s: float
    analysis_s: float
    search_s: float
    staged_s: float
    step_s: float

    @property
    def row(self) -> str:
        seconds = " | ".join(f"{s:.2f}" for s in (self.capture_s, self.analysis_s, self.search_s, self.staged_s))
        return f"| {self.layers} | {self.gpus} | {len(divisors(self.gpus))} | {seconds} | {self.step_s:.3g} |"


def captured_of(layers: int) -> tuple[CapturedModel, float]:
    """A decoder of that depth, and the seconds that capture and normalisation took."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros((BATCH, SEQ), dtype=torch.long)
    start = time.perf_counter()
    captured = normalise(capture(model, {"input_ids": tokens, "labels": tokens}))
    return captured, time.perf_counter() - start


def searched(captured: CapturedModel, gpus: int, depth: int | None = None) -> tuple[float, float, float]:
    """Seconds of the analysis, of the search and of the plan's step, in a process of its own.

    The analysis is all that a ``Workload`` says of a model before a mesh is chosen. depth: layers of the model, to
    search with ``STAGES`` stages and memory in proportion.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_search, args=(captured, gpus, depth, there))
    process.start()
    there.close()
    found: tuple[float, float, float] = here.recv()
    process.join()
    return found


def _search(captured: CapturedModel, gpus: int, depth: int | None, answer: Connection) -> None:
    cluster, constraints = make_cluster("h100-sxm", gpus, 8), Constraints(precision="bf16")
    if depth is not None:
        memory = {name: getattr(cluster.device, name) * depth / LAYERS for name in ("memory_bytes", "reserved_bytes")}
        cluster = replace(cluster, device=replace(cluster.device, **memory))
        constraints = replace(constraints, pp=STAGES, schedule="1f1b")
    start = time.perf_counter()
    workload = Workload.of(captured, constraints.precision)
    for name, attribute in vars(Workload).items():
        if isinstance(attribute, cached_property):
            getattr(workload, name)
    analysed = time.perf_counter()
    result = search_captured(captured, cluster, constraints, workload=workload)
    answer.send((analysed - start, time.perf_counter() - analysed, result.predicted.step_time_s))


def plot(points: list[Point], path: Path) -> None:
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=(f"{GPUS} GPUs, by layers", f"{LAYERS} layers, by divisors of the number of GPUs"),
    )
    deep = [point for point in points if point.gpus == GPUS]
    wide = sorted((p for p in points if p.layers == LAYERS), key=lambda p: (len(divisors(p.gpus)), p.gpus))
    depths, counts = [p.layers for p in deep], [len(divisors(p.gpus)) for p in wide]
    blue, red = "#4c78a8", "#e45756"
    for column, label, xs, ys, colour, texts in (
        (1, "any pipeline", depths, [p.search_s for p in deep], blue, None),
        (1, f"{STAGES} stages, 1F1B, memory in proportion", depths, [p.staged_s for p in deep], red, None),
        (2, "any pipeline", counts, [p.search_s for p in wide], blue, [f"{p.gpus} GPUs" for p in wide]),
    ):
        figure.add_scatter(
            x=xs,
            y=ys,
            name=label,
            text=texts,
            mode="markers+text" if texts else "lines+markers",
            textposition=["bottom center" if number % 2 else "top center" for number in range(len(xs))],
            marker_color=colour,
            cliponaxis=False,
            showlegend=column == 1,
            row=1,
            col=column,
        )
        figure.update_yaxes(title="seconds of search", rangemode="tozero", row=1, col=column)
    figure.update_layout(legend={"orientation": "h", "y": -0.15})
    figure.update_xaxes(title="layers", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title="divisors", rangemode="tozero", row=1, col=2)
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="8,16,32,64,128", help=f"on {GPUS} GPUs")
    parser.add_argument("--gpus", default="8,16,64,96,256,768,1024,4096,6144,16384", help=f"for {LAYERS} layers")
    parser.add_argument("--plot", type=Path, help="page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    wanted = {int(text): [GPUS] for text in options.layers.split(",")}
    wanted.setdefault(LAYERS, []).extend(int(text) for text in options.gpus.split(",") if int(text) != GPUS)
    points = []
    print(f"| layers | GPUs | divisors | capture s | analysis s | search s | {STAGES} stages s | step s |")
    print("|---|---|---|---|---|---|---|---|")
    for layers, counts in wanted.items():
        captured, capture_s = captured_of(layers)
        for gpus in counts:
            analysis_s, search_s, step_s = searched(captured, gpus)
            _, staged_s, _ = searched(captured, gpus, layers)
            points.append(
                Point(
                    layers=layers,
                    gpus=gpus,
                    capture_s=capture_s,
                    analysis_s=analysis_s,
                    search_s=search_s,
                    staged_s=staged_s,
                    step_s=step_s,
                )
            )
            print(points[-1].row, flush=True)
    if options.plot is not None:
        plot(points, options.plot)


if __name__ == "__main__":
    main()
