"""Small models under a set of plans, against one process: the loss, the gradients, the parameters and the buffers.

A *case* is a module of ``tests.cases``. It defines

    model()         the model, built anew at each call
    batch(seed)     the arguments of one forward over the global batch: a tuple, or a dict of keyword arguments

and may define

    loss_fn(output, target)     for a model that does not return its loss; then also
    target(seed)                its second argument
    EVALUATES = True            the case is about ``pm.eval()``: outputs are compared, and nothing is trained
    REFUSED = "text"            no plan can be exact: capture is refused, and the error holds this text
    IMPOSSIBLE = {plan: "text"} plans that the model cannot have; the error holds this text

A *cell* is one case under one plan. Three steps of SGD with momentum have to give the loss within 1e-5 and all else
within 1e-4 of one process in float32. The error of a tensor is |a - b| / max(|b|, 1e-3 |all tensors of its kind|), so
that rounding noise in a gradient that is zero in exact arithmetic does not count.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar
from autopar.ir.errors import AutoparError, CaptureError
from benchmarks.issued import compared
from tests.harness import RankFailure, run_ranks

STEPS = 3
LIMITS = {"loss": 1e-5, "gradient": 1e-4, "parameter": 1e-4, "buffer": 1e-4, "output": 1e-4}

# Name of a plan -> number of ranks and constraints of the search.
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"dp": 2, "zero": 0}),
    "dp2-m2": (2, {"dp": 2, "zero": 0, "num_microbatches": 2}),
    "zero1": (2, {"dp": 2, "zero": 1}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2-tp2": (4, {"dp": 2, "tp": 2}),
}
# Likewise, for cases with experts alone.
EXPERT_PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "ep2-dp2-zero3": (4, {"ep": 2, "dp": 2, "zero": 3}),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}),
    "ep4-tp2": (4, {"ep": 4, "tp": 2}),
}
_EVERY = PLANS | EXPERT_PLANS

# exact: equal to one process. unrecorded: likewise, but the ranks send otherwise than their placed model records.
# refused: CaptureError. impossible: the model cannot have the plan, and an error says so. failed: any other exception,
# or a rank that died or hung.
Verdict = Literal["exact", "wrong", "unrecorded", "refused", "impossible", "failed"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What one case did under one plan. text: the errors of a wrong cell, or the message of one that did not run."""

    case: str
    plan: str
    verdict: Verdict
    text: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = self.text.strip().splitlines() or [""]
        line = lines[-1 if self.verdict == "failed" else 0][:300]
        return f"{self.case} {self.plan}: {self.verdict} ({self.seconds:.1f} s)  {line}".rstrip()


def case_of(name: str) -> ModuleType:
    return importlib.import_module(f"tests.cases.{name}")


def expected(name: str, plan: str) -> tuple[Verdict, str]:
    """The verdict that a cell has to have, and what its text has to hold."""
    case = case_of(name)
    if hasattr(case, "REFUSED"):
        return "refused", case.REFUSED
    impossible = getattr(case, "IMPOSSIBLE", {})
    return ("impossible", impossible[plan]) if plan in impossible else ("exact", "")


def run_cells(cases: Sequence[str], plans: Sequence[str]) -> Iterator[Cell]:
    """All cells of ``cases`` under ``plans``, those of one number of ranks on one group of processes.

    A rank that dies, hangs or is left by the others ends its group; the cell failed, and another group runs the rest.
    """
    for num_ranks in sorted({_EVERY[plan][0] for plan in plans}):
        left = [(case, plan) for case in cases for plan in plans if _EVERY[plan][0] == num_ranks]
        while left:
            with tempfile.TemporaryDirectory(prefix="autopar-cells-") as folder:
                record = Path(folder) / "cells.jsonl"
                failure = "a rank ended the group"
                try:
                    run_ranks(_run_all, num_ranks, left, str(record), limit_s=120.0 + 60.0 * len(left))
                except RankFailure as error:
                    failure = str(error)
                done = [Cell(**json.loads(line)) for line in record.read_text().splitlines()] if record.exists() else []
            yield from done
            left = left[len(done) :]
            if left and not (done and done[-1].verdict == "failed"):
                (case, plan), *left = left
                yield Cell(case, plan, "failed", failure)


def _run_all(cells: Sequence[tuple[str, str]], record: str) -> None:
    """Body of a rank. The first rank records the cells; a failure that may leave ranks apart ends the group."""
    for name, plan in cells:
        start = time.perf_counter()
        try:
            verdict, text = _run_cell(case_of(name), *_EVERY[plan])
        except CaptureError as error:
            verdict, text = "refused", str(error)
        except AutoparError as error:
            verdict, text = "impossible", str(error)
        except Exception:  # whatever it is, it is the cell's result
            verdict, text = "failed", traceback.format_exc()
        if dist.get_rank() == 0:
            cell = Cell(name, plan, verdict, text, time.perf_counter() - start)
            with open(record, "a") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
        if verdict == "failed":
            os._exit(1)


def _run_cell(case: ModuleType, num_ranks: int, constraints: dict[str, Any]) -> tuple[Verdict, str]:
    torch.manual_seed(0)
    model = case.model()
    alone = _copy(case, model)
    extra: dict[str, Any] = {}
    if hasattr(case, "loss_fn"):
        extra = {"loss_fn": case.loss_fn, "example_target": case.target(0)}
    parallel = autopar.parallelize(model, num_ranks, example_inputs=case.batch(0), **extra, **constraints)
    unrecorded: list[str] = []
    if getattr(case, "EVALUATES", False):
        errors = _evaluate(case, alone, parallel)
    else:
        errors = _train(case, alone, parallel, unrecorded)
    wrong = {name: error for name, error in errors.items() if not error <= LIMITS[name.split()[0]]}
    # One rank may be right where another is not.
    gathered: list[dict[str, float]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(gathered, wrong)
    texts = [f"rank {rank}: " + ", ".join(f"{n} {e:.1e}" for n, e in w.items()) for rank, w in enumerate(gathered) if w]
    if unrecorded and not texts:
        return "unrecorded", "; ".join(unrecorded)
    return ("wrong", "; ".join(texts)) if texts else ("exact", "")


def _copy(case: ModuleType, model: nn.Module) -> nn.Module:
    """The same model, built again: some hold what cannot be copied."""
    torch.manual_seed(0)
    built: nn.Module = case.model()
    built.load_state_dict(copy.deepcopy(model.state_dict()))
    return built


def _call(model: Any, arguments: Any, **more: Any) -> Any:
    return model(**arguments, **more) if isinstance(arguments, dict) else model(*arguments, **more)


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
    return loss


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _train(
    case: ModuleType, alone: nn.Module, parallel: autopar.ParallelModule, unrecorded: list[str]
) -> dict[str, float]:
    """Largest relative error of each kind over the steps.

    unrecorded: filled with what the ranks send in the second step otherwise than recorded.
    """
    errors: dict[str, float] = {}

    def note(kind: str, error: float) -> None:
        errors[kind] = max(errors.get(kind, 0.0), error)

    one, many = _optimizer(alone.parameters()), _optimizer(parallel.parameters())
    for step in range(STEPS):
        one.zero_grad()
        many.zero_grad()
        given, target = case.batch(step), {}
        if hasattr(case, "loss_fn"):
            target = {"target": case.target(step)}
            loss = case.loss_fn(_call(alone, given), *target.values())
        else:
            loss = _loss(_call(alone, given))
        rows, wanted_rows = parallel.shard_batch(given), {k: parallel.shard_batch(v) for k, v in target.items()}
        with compared(parallel, unrecorded) if step == 1 else nullcontext():
            got = _call(parallel.step, rows, **wanted_rows)
        loss.backward()
        wanted = float(loss.detach())
        note("loss", abs(float(got) - wanted) / max(abs(wanted), 1e-12))
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in alone.named_parameters()
            if p.requires_grad
        }
        note("gradient", relative(parallel.full_gradients(), gradients))
        one.step()
        many.step()
    state = parallel.full_state_dict()
    parameters = {name for name, _ in alone.named_parameters()}
    whole = dict(alone.state_dict())
    note("parameter", relative(state, {n: t for n, t in whole.items() if n in parameters}))
    note("buffer", relative(state, {n: t for n, t in whole.items() if n not in parameters}))
    buffers = dict(alone.named_buffers())
    note("buffer", relative(here := dict(parallel.named_buffers()), {name: buffers[name] for name in here}))
    return errors


def _evaluate(case: ModuleType, alone: nn.Module, parallel: autopar.ParallelModule) -> dict[str, float]:
    """Errors of outputs in eval mode, twice, and of buffers, which have to stay."""
    alone.eval()
    parallel.eval()
    before = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
    errors: dict[str, float] = {}
    for repeat in range(2):
        given = case.batch(1)
        with torch.no_grad():
            wanted = _call(alone, given)
            got = _call(parallel, parallel.shard_batch(given))
        rows = {name: parallel.shard_batch(leaf) if leaf.dim() else leaf for name, leaf in _leaves(wanted).items()}
        errors[f"output {repeat}"] = relative(_leaves(got), rows)
        if hasattr(case, "loss_fn") or isinstance(wanted, Mapping):
            target = case.target(1) if hasattr(case, "loss_fn") else None
            whole = float(_loss(wanted) if target is None else case.loss_fn(wanted, target))
            found = _call(parallel.loss, parallel.shard_batch(given), target=parallel.shard_batch(target))
            errors["loss"] = max(errors.get("loss", 0.0), abs(float(found) - whole) / abs(whole))
    errors["buffer"] = relative(parallel.full_state_dict(), before)
    return errors


def _leaves(output: Any) -> dict[str, Tensor]:
    """The tensors of a model's output by their place in it."""
    found = pytree.tree_flatten_with_path(dict(output) if isinstance(output, Mapping) else output)[0]
    return {pytree.keystr(path): leaf for path, leaf in found if isinstance(leaf, Tensor)}


def relative(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest relative error of any tensor; infinite if one is missing, of another shape or not finite."""
    worst, whole = 0.0, sum(float(b.detach().double().norm()) ** 2 for b in wanted.values()) ** 0.5
    for name, tensor in wanted.items():
        if name not in got or got[name].shape != tensor.shape:
            return float("inf")
        a, b = got[name].detach().double(), tensor.detach().double()
        error = float((a - b).norm()) / max(float(b.norm()), 1e-3 * whole, 1e-30)
        worst = max(worst, error if error == error else float("inf"))
    return worst


_IN_PARTS = {
    "embedding": ("embedding",),
    "layers.*": ("attention_norm/rms_norm", "mlp_norm/rms_norm", "add", "add:2"),
    "head": ("norm/rms_norm",),
}


def with_norms_in_parts(plan: autopar.Plan) -> autopar.Plan:
    """A tensor-parallel plan of ``examples.gpt`` whose norms and residual sums are computed in parts of the sequence,
    as Megatron's sequence parallelism has it and a search for large models finds."""
    fields = plan.model_dump(mode="json")
    for block in fields["blocks"]:
        for key in _IN_PARTS[block["name"]]:
            block["ops"].setdefault(key, {})["tp"] = "d1"
    return autopar.Plan.model_validate(fields)


def with_attention(plan: autopar.Plan, factors: Mapping[str, str], layout: str | None = None) -> autopar.Plan:
    """A plan with these factors on these mesh axes for every attention (``{"cp": "s&t"}``: a ring), its other axes as
    they are, and with a sequence layout of its own if one is given. Every attention has to be sharded already, since a
    plan does not list replicated ops."""
    fields = plan.model_dump(mode="json")
    attentions = [ops for block in fields["blocks"] for key, ops in block["ops"].items() if key.endswith("attention")]
    assert attentions, "the plan shards no attention"
    for ops in attentions:
        ops.update(factors)
    return autopar.Plan.model_validate(fields | ({"sequence_layout": layout} if layout else {}))
