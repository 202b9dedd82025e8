"""What the search picks, left free, for four large models on three devices, in 16 and 8 bits, on two software stacks.

    python benchmarks/picks.py [--models llama3-70b] [--gpus h100-sxm,b200] [--stacks autopar] [--jobs 2]

Of each pick: the plan, its predicted step, and why: the fastest plan that the search found of the other kind, with a
pipeline where the pick has none and without where it has one, how much longer it would take, and the largest parts of
the difference. Of each, the share of its step in which parameters are gathered and gradients scattered, overlapped or
not: ``zero3_runs.py`` has the same of runs that were published. Nothing runs; no GPU is needed. The devices are whole
nodes or racks, as people rent them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.capture.capture import capture
from autopar.ir.errors import AutoparError
from autopar.ir.precision import parse_precision
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise
from autopar.report.words import one_line, remat_level
from autopar.search.api import search_captured
from autopar.search.outer.configuration import Candidate
from autopar.search.problem.constraints import Constraints
from autopar.search.result import SearchResult
from autopar.units import seconds
from benchmarks.zero3_runs import synchronising_s

EXAMPLES = Path(__file__).parents[1] / "examples"
# Stack -> its recipe of 8-bit floats: ours has one scale a row, Megatron's one a tensor.
RECIPES = {"autopar": "fp8-row", "megatron-core-2025": "fp8-tensor"}
# Parts of a difference that are named.
NAMED = 3


def of_example(name: str) -> Callable[[], nn.Module]:
    return lambda: load_model_file(str(EXAMPLES / name)).meta_model()


def qwen3_235b() -> nn.Module:
    """Qwen3-235B-A22B by its published configuration."""
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, moe_intermediate_size=1536,
            num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40_960, use_cache=False,
        )
    )  # fmt: skip


def gpt_oss_120b() -> nn.Module:
    """GPT-OSS-120B by its published configuration, which but for layers and experts is the class's default."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(num_hidden_layers=36, num_local_experts=128, use_cache=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """devices: type -> number of GPUs. batch: rows of ``seq`` tokens."""

    model: Callable[[], nn.Module]
    devices: dict[str, int]
    batch: int
    seq: int


CASES = {
    "llama3-70b": Case(
        model=of_example("llama3_70b.py"), devices={"h100-sxm": 64, "b200": 64, "gb300": 64}, batch=128, seq=8192
    ),
    "deepseek-v3": Case(
        model=of_example("deepseek_v3.py"), devices={"h100-sxm": 1024, "b200": 256, "gb300": 256}, batch=8192, seq=4096
    ),
    "qwen3-235b": Case(model=qwen3_235b, devices={"h100-sxm": 256, "b200": 256, "gb300": 256}, batch=2048, seq=4096),
    "gpt-oss-120b": Case(model=gpt_oss_120b, devices={"h100-sxm": 64, "b200": 64, "gb300": 64}, batch=1280, seq=4096),
}


def meta_inputs(case: Case) -> dict[str, Tensor]:
    tokens = torch.zeros((case.batch, case.seq), dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def other_kind(result: SearchResult) -> Candidate | None:
    """The fastest plan found that has a pipeline if the pick has none, and none if it has one."""
    piped = result.plan.num_pipeline_ranks > 1
    others = [one for one in result.candidates if (one.configuration.num_stages > 1) is not piped]
    return min(others, key=lambda one: one.predicted.step_time_s, default=None)


def why(result: SearchResult) -> str:
    other, pick = other_kind(result), result.predicted
    if other is None:
        return "none was solved: bounds of its kind are slower than the pick, or nothing fits"
    step_s, own = other.predicted.step_time_s, other.configuration
    kind = f"pp {own.num_stages}" if own.num_stages > 1 else f"no pipeline, ZeRO-{own.zero}"
    parts = other.predicted.breakdown_s
    changes = {name: parts.get(name, 0.0) - pick.breakdown_s.get(name, 0.0) for name in {*parts, *pick.breakdown_s}}
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:NAMED]
    named = ", ".join(f"{name.replace('_', ' ')} {'+' if s > 0 else '−'}{seconds(abs(s))}" for name, s in largest)
    moving = f"moving parameters {synchronising_s(other.predicted) / step_s:.0%}"
    return f"{kind}, {own.num_microbatches} microbatches: {step_s / pick.step_time_s - 1:+.0%} ({named}), {moving}"


def picked(name: str, gpus: list[str], stacks: list[str]) -> list[str]:
    """Lines of the table for one model."""
    torch.set_num_threads(1)
    case = CASES[name]
    with torch.device("meta"):
        model = case.model()
    captured = normalise(capture(model, meta_inputs(case), name=name))
    lines = []
    for gpu, stack in itertools.product(gpus, stacks):
        for precision in ("bf16", f"bf16,{RECIPES[stack]}"):
            compute, recipes = parse_precision(precision)
            cluster = make_cluster(gpu, case.devices[gpu], stack=find_stack(stack))
            start = time.monotonic()
            try:
                found = search_captured(captured, cluster, Constraints(precision=compute, recipes=recipes))
            except AutoparError as error:
                lines.append(f"| {name} | {gpu} | {stack} | {precision} | {str(error).splitlines()[0]} | | | | |")
                continue
            prediction = found.plan.prediction
            assert prediction is not None
            lines.append(
                f"| {name} | {case.devices[gpu]} {gpu} | {stack} | {precision} | {one_line(found.plan)}, "
                f"{remat_level(found.plan)} | {seconds(prediction.step_time_s)} | {prediction.mfu:.0%} | "
                f"{synchronising_s(found.predicted) / prediction.step_time_s:.0%} | {why(found)} |"
            )
            print(f"{lines[-1]} {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--gpus", default="h100-sxm,b200,gb300")
    parser.add_argument("--stacks", default=",".join(RECIPES))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    names = options.models.split(",")
    print("| model | devices | stack | precision | pick | step | MFU | moving parameters | fastest of the other kind |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        asked = itertools.repeat(options.gpus.split(",")), itertools.repeat(options.stacks.split(","))
        for lines in pool.map(picked, names, *asked):
            print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
