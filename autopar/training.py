"""``autopar train``: one process a rank on this machine, and the loop that each of them runs.

``launch`` starts the ranks with torch's elastic launcher and this module as their program. Under a torchrun of
your own, on one machine or many, start ``autopar.training`` with the same arguments.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import os
import statistics
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.errors import AutoparError, InvalidInput
from autopar.ir.plan import Plan
from autopar.model_file import ModelFile, load_model_file

# Relative difference of the losses above which a comparison in float32 fails.
TOLERANCE = 1e-4
_BAD_INPUT = 2
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """model: MODEL of the command line; plan: path. seq_len: None for the model file's default.

    steps: in all, those before a checkpoint included. save, resume: folders of checkpoints. save_every: steps
    between two (None: one after the last step). seed: of weights and data; the checkpoint's, if one is resumed.
    """

    model: str
    plan: str
    steps: int
    seq_len: int | None = None
    compare_single: bool = False
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    seed: int = 0
    save: str | None = None
    save_every: int | None = None
    resume: str | None = None

    def check(self) -> Plan:
        """The plan. Raises what would go wrong on every rank, before there are any."""
        if self.optimizer not in ("adamw", "sgd"):
            raise InvalidInput(f"unknown optimizer {self.optimizer!r}; expected adamw or sgd")
        if self.save_every is not None and self.save is None:
            raise InvalidInput("--save-every needs a folder to save to.\n  try: --save DIR")
        plan = Plan.load(self.plan)
        load_model_file(self.model).meta_inputs(plan.batch.global_size, self.seq_len)
        return plan


def launch(job: TrainingJob) -> int:
    """Trains on as many processes of this machine as the plan has ranks; returns the exit code.

    Rank 0 prints. If a rank fails the others are ended. Raises AutoparError if the job cannot start.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    plan = job.check()
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // plan.num_ranks)))
    if torch.cuda.device_count() < plan.num_ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # more ranks than GPUs: all of them on CPUs
    # The launcher reports a failed rank in a page of its own; the rank has already said what is wrong.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "autopar.training", json.dumps(asdict(job)))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return _BAD_INPUT if _BAD_INPUT in codes else 1
    return 0


def train(job: TrainingJob) -> bool:
    """The loop of one rank. Returns whether the losses agree with one process (True if not compared)."""
    import autopar
    from autopar.runtime.launch import ensure_process_group, this_device

    ensure_process_group()
    rank = dist.get_rank()
    plan = Plan.load(job.plan)
    source = load_model_file(job.model)
    torch.manual_seed(job.seed)
    model = source.build()
    single = _Single(copy.deepcopy(model), job) if job.compare_single and rank == 0 else None
    parallel = autopar.parallelize(
        model,
        plan.num_ranks,
        example_inputs=source.meta_inputs(plan.batch.global_size, job.seq_len),
        plan=plan,
    )
    optimizer = _optimizer(job, parallel)
    scaler = autopar.LossScaler(parallel) if plan.precision == "fp16" else None
    done, seed = 0, job.seed
    if job.resume is not None:
        progress = autopar.load(parallel, optimizer, job.resume, scaler=scaler)
        done, seed = progress.step, progress.data["seed"]
    batches = _batches(source, job, plan.batch.global_size, seed)
    report = _Report(job, plan, this_device(), done, quiet=rank != 0)
    for batch in itertools.islice(batches, done):
        # Where the data stood. One process, if it is compared, trains from the start.
        if single is not None:
            single.step(batch)
    for number, batch in enumerate(itertools.islice(batches, max(0, job.steps - done)), done + 1):
        start = time.perf_counter()
        args, kwargs = _arguments(parallel.shard_batch(batch))
        loss = parallel.step(*args, **kwargs)
        optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        report.step(float(loss), seconds, None if single is None else single.step(batch))
        if job.save is not None and (number == job.steps or (job.save_every and number % job.save_every == 0)):
            autopar.save(
                parallel, optimizer, job.save, scaler=scaler, step=number, data={"seed": seed}, asynchronous=True
            )
    # A write may be going on; the process group has to outlive it.
    parallel.engine.background.finish()
    report.end()
    dist.barrier()
    return report.agrees


class _Single:
    """The same training on one process, for comparison."""

    def __init__(self, model: nn.Module, job: TrainingJob) -> None:
        self.model = model
        self.optimizer = _optimizer(job, model)

    def step(self, batch: Any) -> float:
        args, kwargs = _arguments(batch)
        output = self.model(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class _Report:
    """Prints the loss of every step, and at the end how fast and how exact it was."""

    def __init__(self, job: TrainingJob, plan: Plan, device: torch.device, done: int, *, quiet: bool) -> None:
        """done: steps before those that are reported."""
        self.job, self.plan, self.done, self.quiet = job, plan, done, quiet
        self.seconds: list[float] = []
        self.differences: list[float] = []
        mesh = "  ".join([f"pp {plan.num_pipeline_ranks}", *(f"{axis} {size}" for axis, size in plan.mesh.items())])
        self._print(f"{plan.model.name} on {plan.num_ranks} {device.type} ranks: {mesh}  {plan.precision}")
        columns = "   one process   relative difference" if job.compare_single else ""
        self._print(f"step        loss{columns}   seconds")

    def step(self, loss: float, seconds: float, single: float | None) -> None:
        self.seconds.append(seconds)
        columns = ""
        if single is not None:
            # NaN on either side counts as the largest difference there is.
            difference = abs(loss - single) / abs(single) if loss == loss and single == single else float("inf")
            self.differences.append(difference)
            columns = f"   {single:11.6f}   {difference:19.1e}"
        self._print(f"{self.done + len(self.seconds):4d}  {loss:10.6f}{columns}   {seconds:7.3f}")

    def end(self) -> None:
        if not self.seconds:
            self._print(f"nothing to do: {self.done} steps are done")
            return
        # The first step also allocates and connects.
        median = statistics.median(self.seconds[1:] or self.seconds)
        self._print(f"median step {median:.3f} s")
        if self.differences:
            self._print(f"largest relative difference from one process: {max(self.differences):.1e}")

    @property
    def agrees(self) -> bool:
        return not self.differences or self.plan.precision != "fp32" or max(self.differences) <= TOLERANCE

    def _print(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


def _optimizer(job: TrainingJob, model: nn.Module) -> torch.optim.Optimizer:
    if job.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate)


def _batches(source: ModelFile, job: TrainingJob, batch_size: int, seed: int) -> Iterator[Any]:
    """Global batches, the same on every rank; the example inputs over and over for a model without data."""
    if source.batches is not None:
        yield from source.batches(batch_size, job.seq_len, seed)
    while True:
        yield source.inputs(batch_size, job.seq_len)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def main() -> None:
    """One rank: the job as JSON. Exit code 2 for a mistake of the user's, which rank 0 explains."""
    parser = argparse.ArgumentParser(description="One rank of autopar train; started by torchrun.")
    parser.add_argument("job", help="a TrainingJob as JSON")
    job = TrainingJob(**json.loads(parser.parse_args().job))
    try:
        agrees = train(job)
    except AutoparError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            # The launcher ends all ranks once one has left; the first one gets to speak.
            time.sleep(_LAST_WORDS_S)
        sys.exit(_BAD_INPUT)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
