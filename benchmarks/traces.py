"""A training run of one model, on one process or on many, as what of it is compared: losses, gradients, tensors.

The error of a tensor is |a - b| / max(|b|, 1e-5 |all of them|). A gradient that is zero in exact arithmetic (a key's
bias: float64 says so) is rounding noise in both runs; it has to be below 1e-6 of all gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from models import Case, build
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autopar
from autopar.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Steps:
    """What a run does: steps under SGD with momentum, then steps under AdamW, of which losses alone are compared, since
    AdamW makes the sign of a rounding error a step of full size.

    compared: steps under SGD whose gradients are compared; after the last of them, the parameters and buffers.
    """

    sgd: int = 5
    adamw: int = 5
    compared: tuple[int, ...] = (0, 4)

    def __len__(self) -> int:
        return self.sgd + self.adamw

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


TEN = Steps()


@dataclass(slots=True)
class Trace:
    """What one training run did: the loss of every step, the gradients of the steps that are compared, and the
    parameters and persistent buffers after the last of those.

    zeros: for each of ``gradients``, the parameters whose gradient is zero in exact arithmetic.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    zeros: list[set[str]] = field(default_factory=list)


def optimizers_of(case: Case, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Those of one run, SGD and then AdamW."""
    return [
        torch.optim.SGD(parameters, lr=case.learning_rate, momentum=0.9),
        torch.optim.AdamW(parameters, lr=1e-3),
    ]


def loss_of(case: Case, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    batch = dict(batch)
    if case.loss_fn is not None:
        target = batch.pop("target")
        return case.loss_fn(model(**batch), target)
    output = model(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
    return loss


def train_alone(case: Case, steps: Steps = TEN) -> Trace:
    model = build(case)
    sgd, adamw = optimizers_of(case, list(model.parameters()))
    trace = Trace()
    for step in steps:
        optimizer = sgd if step < steps.sgd else adamw
        if step in steps.compared:
            trace.zeros.append(zero_gradients(case, model, step))
        optimizer.zero_grad()
        loss = loss_of(case, model, case.batch(step))
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if step in steps.compared:
            trace.gradients.append(
                {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in trained.items()}
            )
        optimizer.step()
        if step == steps.compared[-1]:
            state = {n: t.clone() for n, t in model.state_dict().items()}
            names = {name for name, _ in model.named_parameters()}
            trace.parameters = {n: t for n, t in state.items() if n in names}
            trace.buffers = {n: t for n, t in state.items() if n not in names}
    return trace


class Widened(TorchFunctionMode):
    """Computes in float64 what a model says to compute in float32, as the statistics of a norm, scores and losses."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


def in_float64(case: Case) -> Case:
    """The case with all that its model computes in float64."""

    def made() -> nn.Module:
        model = case.build().double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products have no float64 kernel
        own = type(model)
        model.__class__ = type(own.__name__, (own,), {"forward": widened(own.forward)})
        return model

    def widened(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Widened():
                return function(*args, **kwargs)

        return run

    def batch(step: int) -> dict[str, Any]:
        given = case.batch(step)
        return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}

    loss_fn = None if case.loss_fn is None else widened(case.loss_fn)
    return replace(case, build=made, batch=batch, loss_fn=loss_fn)


def zero_gradients(case: Case, model: nn.Module, step: int) -> set[str]:
    """Parameters whose gradient vanishes in float64, compared with all of them; none if the model wants float32."""
    case = in_float64(case)
    wide = build(case)
    wide.load_state_dict(model.state_dict())
    try:
        loss_of(case, wide, case.batch(step)).backward()
    except (RuntimeError, TypeError):
        return set()
    norms = {name: float(p.grad.norm()) for name, p in wide.named_parameters() if p.grad is not None}
    return {name for name, norm in norms.items() if norm < 1e-12 * max(norms.values())}


def planned(case: Case, ranks: int, constraints: dict[str, Any]) -> Plan:
    """The plan that a search under ``constraints`` finds. All ranks together."""
    extra: dict[str, Any] = {"loss_fn": case.loss_fn} if case.loss_fn is not None else {}
    return autopar.parallelize(build(case), ranks, example_inputs=case.batch(0), **extra, **constraints).plan


def train_parallel(
    case: Case,
    ranks: int,
    constraints: dict[str, Any],
    steps: Steps = TEN,
    watch: Callable[[autopar.ParallelModule], AbstractContextManager[None]] | None = None,
) -> tuple[Trace, Plan]:
    """On every rank of a process group; gradients, parameters and buffers are whole ones.

    constraints: of the search, or ``plan=...``. watch: gives what the second step is made in.
    """
    example = case.batch(0)
    extra: dict[str, Any] = {"loss_fn": case.loss_fn} if case.loss_fn is not None else {}
    model = build(case)
    parallel = autopar.parallelize(model, ranks, example_inputs=example, **extra, **constraints)
    sgd, adamw = optimizers_of(case, list(parallel.parameters()))
    names = {name for name, _ in model.named_parameters()}
    trace = Trace()
    for step in steps:
        optimizer = sgd if step < steps.sgd else adamw
        optimizer.zero_grad()
        rows = parallel.shard_batch(case.batch(step))
        with watch(parallel) if watch is not None and step == 1 else nullcontext():
            loss = parallel.step(**rows)
        trace.losses.append(float(loss))
        if step in steps.compared:
            trace.gradients.append({n: g for n, g in parallel.full_gradients().items() if n in names})
        optimizer.step()
        if step == steps.compared[-1]:
            state = parallel.full_state_dict()
            trace.parameters = {n: t for n, t in state.items() if n in names}
            trace.buffers = {n: t for n, t in state.items() if n not in names}
    return trace, parallel.plan


def describe(plan: Plan) -> str:
    """A plan in a few words, with what its axes shard."""
    used: dict[str, set[str]] = {}
    for block in plan.blocks:
        for factors in block.ops.values():
            for axis, factor in factors.items():
                used.setdefault(axis, set()).add(factor)
    axes = " ".join(
        f"{name}{size}[{','.join(sorted(used.get(name, set())))}]" for name, size in plan.mesh.items() if size > 1
    )
    batches = f"zero{plan.zero} M{plan.batch.num_microbatches} {plan.schedule} v{plan.virtual_stages}"
    return f"pp{plan.num_pipeline_ranks} {axes} {batches}".replace("  ", " ")


def relative(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], zeros: Collection[str] = ()) -> float:
    """Largest relative error of any tensor; infinite if one is missing or not finite."""
    whole = torch.sqrt(
        sum((b.double().square().sum() for b in expected.values()), torch.zeros((), dtype=torch.float64))
    )
    worst = 0.0
    for name, b in expected.items():
        if name not in got or got[name].shape != b.shape:
            return float("inf")
        scale = max(float(b.double().norm()), (1e-2 if name in zeros else 1e-5) * float(whole), 1e-30)
        error = float((got[name].double() - b.double()).norm()) / scale
        worst = max(worst, error if error == error else float("inf"))
    return worst
