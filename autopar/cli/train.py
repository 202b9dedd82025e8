"""The command ``train``."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import options as opt
from autopar.cli.outputs import check_folder

_DATA = "Data"
_CHECKPOINTS = "Checkpoints"
_NUMBERS = "Numbers (docs/survival.md)"
_RANKS = "Ranks and network (docs/launching.md)"


def train(
    model: opt.Model,
    plan: opt.PlanFile,
    steps: Annotated[int, typer.Option("--steps", min=1, help="training steps in all, resumed ones included")] = 10,
    seq: opt.Seq = None,
    compare_single: Annotated[
        bool, typer.Option("--compare-single", help="train beside it on one process and print both losses")
    ] = False,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw or sgd (with momentum)")] = "adamw",
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="learning rate")] = 1e-3,
    seed: Annotated[int, typer.Option("--seed", help="of the weights and the data")] = 0,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="WHERE",
            help="text (a byte is a token) or arrays of tokens (.npy, .bin): a file, a folder or a pattern; stdlib for "
            "the source of Python's standard library; the model file's own batches if not given",
            rich_help_panel=_DATA,
        ),
    ] = None,
    token_dtype: Annotated[
        str, typer.Option("--token-dtype", help="of .bin files: uint8 to int64", rich_help_panel=_DATA)
    ] = "uint16",
    eval_every: Annotated[
        int | None,
        typer.Option(
            "--eval-every",
            min=1,
            help="steps between evaluations, of the model in eval mode; only after the last step if not given",
            rich_help_panel=_DATA,
        ),
    ] = None,
    eval_data: Annotated[
        str | None,
        typer.Option(
            "--eval-data",
            metavar="WHERE",
            help="what it is evaluated on, like --data: its first batches, the same ones each time",
            rich_help_panel=_DATA,
        ),
    ] = None,
    eval_batches: Annotated[
        int,
        typer.Option("--eval-batches", min=1, help="global batches of an evaluation, at most", rich_help_panel=_DATA),
    ] = 8,
    save: Annotated[
        Path | None, typer.Option("--save", help="write checkpoints to this folder", rich_help_panel=_CHECKPOINTS)
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            "--save-every",
            min=1,
            help="steps between them; if not given after the last, under --job after each tenth of the steps",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="how many of the newest stay", rich_help_panel=_CHECKPOINTS)
    ] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="go on from the checkpoint in this folder, saved under any plan, and where it stood in the data",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    job_folder: Annotated[
        Path | None,
        typer.Option(
            "--job",
            metavar="DIR",
            help="save to this folder, and start or go on from the newest undamaged checkpoint in it: one command for "
            "the first start and every restart",
            rich_help_panel=_CHECKPOINTS,
        ),
    ] = None,
    on_nan: Annotated[
        str,
        typer.Option(
            "--on-nan",
            metavar="stop|skip|rollback",
            help="of a step whose loss or gradient norm is not finite, or has jumped: skip makes no update, rollback "
            "goes back to the newest checkpoint and then makes none",
            rich_help_panel=_NUMBERS,
        ),
    ] = "stop",
    max_jump: Annotated[
        float | None,
        typer.Option(
            "--max-jump",
            metavar="F",
            help="a loss or gradient norm of more than F times the median of the last 50 steps has jumped; none has if "
            "not given",
            rich_help_panel=_NUMBERS,
        ),
    ] = None,
    check_copies_every: Annotated[
        int | None,
        typer.Option(
            "--check-copies-every",
            min=1,
            metavar="N",
            help="every N steps, and before a checkpoint, compare the bits of parameters that several ranks hold",
            rich_help_panel=_NUMBERS,
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            "--disk",
            metavar="FOLDER",
            help="on a local disk of every node, for parameters and optimiser state that the plan keeps there",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="start the ranks on a Ray cluster: HOST:PORT, auto for the one that runs here, local for a new one",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    cpus_per_rank: Annotated[
        int, typer.Option("--cpus-per-rank", min=1, help="CPUs of Ray that each rank takes", rich_help_panel=_RANKS)
    ] = 1,
    network_interface: Annotated[
        str | None,
        typer.Option("--network-interface", metavar="NAME", help="of NCCL and gloo, as eth0", rich_help_panel=_RANKS),
    ] = None,
    infiniband: Annotated[
        str | None,
        typer.Option(
            "--infiniband", metavar="ADAPTERS", help="of NCCL, as mlx5_0,mlx5_1; off for none", rich_help_panel=_RANKS
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=1.0, metavar="SECONDS", help="to join, and for a collective", rich_help_panel=_RANKS
        ),
    ] = None,
    keep_alive: Annotated[
        bool,
        typer.Option(
            "--keep-alive",
            help="supervise the ranks: after any failure go on from copies of the state in memory (docs/survival.md)",
            rich_help_panel=_RANKS,
        ),
    ] = False,
    failures: Annotated[
        int,
        typer.Option(
            "--failures", min=0, help="with --keep-alive, in a row after which the job ends", rich_help_panel=_RANKS
        ),
    ] = 3,
    exclude_stragglers: Annotated[
        bool,
        typer.Option(
            "--exclude-stragglers",
            help="with --keep-alive, which names a rank that is 1.3 x slower than the median for 20 steps: go on "
            "without it, in a spare place or under a plan for fewer ranks",
            rich_help_panel=_RANKS,
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="say how ranks connect; check that their collectives match", rich_help_panel=_RANKS
        ),
    ] = False,
    json: opt.JsonOfRanks = False,
) -> None:
    """Train under a plan, one process a rank: NCCL on GPUs, gloo on CPUs. Under torchrun it joins that job."""
    gc.enable()
    from autopar.launching.launch import launch
    from autopar.runtime.environment import Environment
    from autopar.training.job import TrainingJob

    if ray is None:
        check_folder(save)
    job = TrainingJob(
        model=model, plan=str(plan), steps=steps, seq_len=seq, compare_single=compare_single, optimizer=optimizer,
        learning_rate=lr, seed=seed, save=None if save is None else str(save), save_every=save_every,
        resume=None if resume is None else str(resume), job=None if job_folder is None else str(job_folder), keep=keep,
        data=data, token_dtype=token_dtype, json=json,
        eval_every=eval_every, eval_data=eval_data, eval_batches=eval_batches, keep_alive=keep_alive, failures=failures,
        on_nan=on_nan, max_jump=max_jump, check_copies_every=check_copies_every, exclude_stragglers=exclude_stragglers,
        disk=None if disk is None else str(disk),
        environment=Environment(interface=network_interface, infiniband=infiniband, debug=debug, timeout_s=timeout),
    )  # fmt: skip
    code = launch(job, ray=ray, cpus_per_rank=cpus_per_rank)
    if code:
        raise typer.Exit(code)
