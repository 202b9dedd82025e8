"""Predicted against published: seconds a step and peak memory of training runs that others have measured.

    python benchmarks/published.py [--data DIR] [--families sc21,titan] [--rows titan-001] [--plot published.html]

Each row of ``runs.csv`` is a model of the stated shape on the stated cluster under the stated plan. The code of
``autopar estimate`` predicts it, with memory enough that nothing is refused. Rows that do not state what a prediction
needs are listed with what is missing. Runs of software older than fused attention are taken with attention spelt out.
Ranking groups are plans for one workload whose true order is known. Constants of the cost model are not fitted here
(``fit.py`` does), and nothing depends on the name of a row beyond the family it is counted in.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.fitted import FITTED, Fitted
from autopar.ir.capture import capture
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Precision
from autopar.passes.normalise import normal_form
from autopar.passes.normalise.eager_attention import FuseEagerAttention
from autopar.passes.pipeline import run_passes
from autopar.search.api import estimate_captured
from autopar.search.constraints import Constraints, Remat

ROOT = Path(__file__).parent.parent
GIB = 2**30

# Column gpu -> catalogue name.
GPUS = {"A100-80GB": "a100-80gb", "H100": "h100-sxm", "H100-96GB-HBM2e": "h100-96gb"}
# Parts of the column source: software from before May 2022, when the first fused attention was published.
BEFORE_FUSED_ATTENTION = ("SC21", "Jan 2021", "MT-NLG", "arXiv 2205.05198")
PRECISIONS: dict[str, Precision] = {"fp16": "fp16", "bf16": "bf16", "16bit": "bf16"}
ENOUGH = 1 << 50


def unfused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """The kernels that Megatron-LM ran: two products, between them softmax (scale and mask in it) and dropout."""
    weights = functional.dropout(torch.softmax(query @ key.transpose(-1, -2), -1), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("unfused", unfused_attention)


class Missing(Exception):
    """A row does not state what a prediction needs."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    cells: dict[str, str]

    def __getattr__(self, name: str) -> str:
        return self.cells[name]

    def number(self, name: str, default: int | None = None) -> int:
        text = self.cells[name]
        if text:
            return int(text)
        if default is None:
            raise Missing(name)
        return default

    @property
    def family(self) -> str:
        return self.id.split("-")[0]

    @property
    def is_memory(self) -> bool:
        return self.reported_metric == "peak_memory_gb"

    @property
    def tokens(self) -> int:
        return self.number("global_batch") * self.number("seq_len")

    def reported(self) -> float:
        """Seconds a step, or bytes for rows of memory."""
        value, metric = float(self.reported_value), self.reported_metric
        if metric == "step_seconds":
            return value
        if metric == "peak_memory_gb":
            return value * GIB
        if metric == "tokens_per_s_per_gpu":
            return self.tokens / (value * self.number("n_gpus"))
        if metric == "tflops_per_gpu":
            return self.flops() / (value * 1e12 * self.number("n_gpus"))
        raise Missing(f"a figure that says seconds ({metric})")

    def flops(self) -> float:
        """Floating point operations of a step, as the source counts them."""
        layers, hidden, seq = (self.number(name) for name in ("layers", "hidden", "seq_len"))
        if "HARDWARE" in self.notes:  # Narayanan et al. 2021, equation 3: with recomputation
            vocab = self.number("vocab")
            shape = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
            return 96.0 * self.tokens * layers * hidden**2 * shape
        active = float(self.params_b) * 1e9
        if self.experts:
            inner = 3 * hidden * self.number("ffn_hidden") * layers
            active = active - (self.number("experts") - self.number("top_k")) * inner
        return self.tokens * (6 * active + 6 * layers * hidden * seq)

    def model(self) -> nn.Module:
        """A model of the stated shape, from Hugging Face's code."""
        common: dict[str, Any] = {
            "vocab_size": self.number("vocab"),
            "use_cache": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
        }
        if not self.model_name.startswith(("llama", "mixtral")):
            config: Any = transformers.GPT2Config(
                n_embd=self.number("hidden"),
                n_layer=self.number("layers"),
                n_head=self.number("heads"),
                n_inner=self.number("ffn_hidden"),
                n_positions=self.number("seq_len"),
                activation_function="gelu_pytorch_tanh",  # one kernel, as in Megatron and DeepSpeed
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0 if self.fused_attention else 0.1,  # Megatron-LM's default, a kernel of its own
                attn_implementation="sdpa" if self.fused_attention else "unfused",
                **common,
            )
            return transformers.GPT2LMHeadModel(config)
        shape = {
            "hidden_size": self.number("hidden"),
            "intermediate_size": self.number("ffn_hidden"),
            "num_hidden_layers": self.number("layers"),
            "num_attention_heads": self.number("heads"),
            "num_key_value_heads": self.number("kv_heads"),
            "max_position_embeddings": self.number("seq_len"),
            "tie_word_embeddings": False,
        }
        if self.experts:
            experts = {"num_local_experts": self.number("experts"), "num_experts_per_tok": self.number("top_k")}
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape, **experts, **common))
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **common))

    @property
    def model_name(self) -> str:
        return self.cells["model"]

    @property
    def fused_attention(self) -> bool:
        return not any(part in self.source for part in BEFORE_FUSED_ATTENTION)

    def devices(self, fitted: Fitted = FITTED) -> Cluster:
        count = self.number("n_gpus")
        return make_cluster(GPUS[self.gpu], count, min(8, count), fitted=fitted)

    def cluster(self, fitted: Fitted = FITTED) -> Cluster:
        """The devices, with memory for whatever was run."""
        return self.devices(fitted).with_memory(ENOUGH)

    def constraints(self) -> Constraints:
        degrees = {name: self.number(name, 1) for name in ("tp", "cp", "pp", "ep")}
        if not self.tp or not self.pp:
            raise Missing("tp, pp")
        data, virtual, pipelined = self.number("dp"), self.number("vpp", 1), degrees["pp"] > 1
        if pipelined and "interleaved" in self.schedule and not self.vpp:
            raise Missing("vpp, though its schedule is interleaved")
        micro = self.number("micro_batch", 1 if pipelined else None)
        return Constraints(
            **degrees,
            dp=data // degrees["ep"],
            sequence_parallel=self.sp == "1" if degrees["tp"] > 1 else None,
            num_microbatches=self.number("global_batch") // (data * micro),
            precision=PRECISIONS[self.precision.split()[0]],
            remat=self.remat(),
            schedule=("interleaved" if virtual > 1 else "1f1b") if pipelined else None,
            virtual_stages=virtual if pipelined and virtual > 1 else None,
            **self.zero(),
        )

    def zero(self) -> dict[str, Any]:
        kind = self.zero_stage_or_fsdp
        if "no reshard" in kind:
            return {"zero": 3, "reshard_after_forward": False}
        if kind in ("fsdp", "zero3"):
            return {"zero": 3}
        return {"zero": {"zero1": 1, "zero2": 2}.get(kind, 0)}

    def remat(self) -> Remat:
        """Megatron's "selective" recomputes attention scores alone. Fused attention never keeps them; beside attention
        spelt out, what ours runs again is mostly that. Torchtitan's "selective (op)" keeps every second product."""
        if "every other" in self.recompute:
            raise Missing("a level that every block has (every other layer is rematerialised)")
        levels: dict[str, Remat] = {"full": "full", "selective (op)": "alternate"}
        if not self.fused_attention:
            levels["selective"] = "selective"
        return levels.get(self.recompute, "none")


def captured_of(row: Row, known: dict[tuple[str, ...], CapturedModel]) -> CapturedModel:
    """The model of a row; the last one is kept, as rows of one model follow each other."""
    names = ("model", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len", "global_batch")
    shape = (*(row.cells[name] for name in names), str(row.fused_attention))
    if shape not in known:
        known.clear()
        with torch.device("meta"):
            tokens = torch.zeros((row.number("global_batch"), row.number("seq_len")), dtype=torch.long)
            model, inputs = row.model(), {"input_ids": tokens, "labels": tokens.clone()}
        rewrites = [p for p in normal_form() if row.fused_attention or not isinstance(p, FuseEagerAttention)]
        known[shape] = run_passes(capture(model, inputs), rewrites, check=False)
    return known[shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: seconds, or bytes."""

    row: Row
    reported: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.reported - 1


def predict(row: Row, known: dict[tuple[str, ...], CapturedModel]) -> Compared:
    """Raises Missing, or AutoparError where the plan cannot be."""
    reported, constraints = row.reported(), row.constraints()
    found = estimate_captured(captured_of(row, known), row.cluster(), constraints).predicted
    return Compared(row=row, reported=reported, predicted=found.peak_bytes if row.is_memory else found.step_time_s)


def summary(name: str, errors: list[float]) -> str:
    absolute = sorted(abs(error) for error in errors)
    worst = quantiles(absolute, n=10, method="inclusive")[-1] if len(absolute) > 1 else absolute[0]
    middle = median(errors)
    return f"| {name} | {len(errors)} | {100 * middle:+.1f} % | {100 * median(absolute):.1f} % | {100 * worst:.1f} % |"


def ranking(path: Path, compared: dict[str, Compared]) -> tuple[int, int, list[str]]:
    """Of pairs in one group that differ by over 5 %: how many are in the right order, how many there are, the wrong."""
    groups: dict[str, list[str]] = {}
    for cells in csv.DictReader(path.open()):
        groups.setdefault(cells["group"], []).append(cells["row_id"])
    right, total, wrong = 0, 0, []
    for group, rows in groups.items():
        for a, b in combinations([compared[row] for row in rows if row in compared], 2):
            if max(a.reported, b.reported) < 1.05 * min(a.reported, b.reported):
                continue
            total += 1
            if (a.reported < b.reported) == (a.predicted < b.predicted):
                right += 1
            else:
                wrong.append(f"{group}: {a.row.id}, {b.row.id}")
    return right, total, wrong


def plot(compared: list[Compared], path: Path) -> None:
    """Predicted over reported, as a page of its own."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for family in sorted({one.row.family for one in compared}):
        own = [one for one in compared if one.row.family == family]
        figure.add_scatter(
            x=[one.reported for one in own],
            y=[one.predicted for one in own],
            text=[one.row.id for one in own],
            mode="markers",
            name=family,
        )
    ends = [min(one.reported for one in compared), max(one.reported for one in compared)]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"dash": "dot", "color": "grey"})
    figure.update_xaxes(type="log", title="reported seconds a step")
    figure.update_yaxes(type="log", title="predicted seconds a step")
    figure.write_html(path, include_plotlyjs=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "published", help="with runs.csv")
    parser.add_argument("--families", help="of these alone")
    parser.add_argument("--rows", help="these alone")
    parser.add_argument("--plot", type=Path, help="page to write")
    options = parser.parse_args()
    if not (options.data / "runs.csv").is_file():
        parser.error(f"there is no {options.data / 'runs.csv'}; pass --data")
    torch.set_num_threads(1)
    rows = [Row(cells) for cells in csv.DictReader((options.data / "runs.csv").open())]
    if options.families:
        rows = [row for row in rows if row.family in options.families.split(",")]
    if options.rows:
        rows = [row for row in rows if row.id in options.rows.split(",")]
    compared: dict[str, Compared] = {}
    left_out: list[str] = []
    known: dict[tuple[str, ...], CapturedModel] = {}
    print("| row | reported | predicted | error |\n|---|---|---|---|")
    for row in rows:
        try:
            found = predict(row, known)
        except Missing as missing:
            left_out.append(f"{row.id}: does not say {missing}")
            continue
        except AutoparError as error:
            left_out.append(f"{row.id}: {str(error).splitlines()[0]}")
            continue
        compared[row.id] = found
        unit, scale = ("GiB", GIB) if row.is_memory else ("s", 1)
        print(
            f"| {row.id} | {found.reported / scale:.3g} {unit} | {found.predicted / scale:.3g} {unit} "
            f"| {100 * found.error:+.1f} % |",
            flush=True,
        )
    times = [one for one in compared.values() if not one.row.is_memory]
    memory = [one.error for one in compared.values() if one.row.is_memory]
    print("\n| family | rows | median | median of absolute | 90th percentile of absolute |\n|---|---|---|---|---|")
    for family in sorted({one.row.family for one in times}):
        print(summary(family, [one.error for one in times if one.row.family == family]))
    if times:
        print(summary("all step times", [one.error for one in times]))
    if memory:
        print(summary("peak memory", memory))
    right, total, wrong = ranking(options.data / "ranking_groups.csv", compared)
    print(f"\npairs of plans in the right order: {right} of {total}", *(f"  wrong: {pair}" for pair in wrong), sep="\n")
    print("\nnot predicted:", *(f"  {reason}" for reason in left_out), sep="\n")
    if options.plot and times:
        plot(times, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
