"""The commands: search, estimate, lengths, show, report, explain, compare, check, partition, profile, export, train."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from autopar import __version__
from autopar.cli import options as opt
from autopar.cli.json_output import print_json
from autopar.cli.lengths import lengths
from autopar.cli.request import Request
from autopar.cli.several_sizes import run_sizes
from autopar.cli.sizes import shares_of, sizes_of
from autopar.cli.train import train
from autopar.ir.errors import AutoparError
from autopar.ir.plan import Plan

app = typer.Typer(
    name="autopar",
    help="Finds the fastest way to train a PyTorch model on a cluster, and trains it that way.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _example(*lines: str) -> str:
    return "[dim]Examples:[/dim]\n\n" + "\n\n".join(f"  [cyan]{escape(line)}[/cyan]" for line in lines)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


def _planner(*, pin_degrees: bool) -> Callable[..., None]:
    """The function behind ``search`` and ``estimate``, which take the same flags."""

    def command(
        model: opt.Model,
        gpus: opt.Gpus = None,
        gpu: opt.Gpu = None,
        gpus_per_node: opt.GpusPerNode = None,
        stack: opt.Stack = None,
        cluster: opt.ClusterFile = None,
        global_batch: opt.GlobalBatches = None,
        seq: opt.Seqs = None,
        shares: opt.Shares = None,
        lengths: opt.Lengths = None,
        pack: opt.Pack = None,
        pp: opt.Pp = None,
        dp: opt.Dp = None,
        tp: opt.Tp = None,
        cp: opt.Cp = None,
        ep: opt.Ep = None,
        sp: opt.Sp = None,
        zero: opt.Zero = None,
        shard: opt.Shard = None,
        sequence_layout: opt.SequenceLayout = None,
        reshard: opt.Reshard = None,
        prefetch: opt.Prefetch = None,
        offload: opt.Offload = None,
        schedule: opt.Schedule = None,
        virtual_stages: opt.VirtualStages = None,
        microbatch: opt.Microbatch = None,
        num_microbatches: opt.NumMicrobatches = None,
        expert_capacity: opt.ExpertCapacity = None,
        expert_load: opt.ExpertLoad = None,
        precision: opt.Precision = None,
        remat: opt.Remat = None,
        activation_memory: opt.ActivationMemory = None,
        fit_probability: opt.FitProbability = None,
        constrain: opt.Constrain = None,
        recipe: opt.RecipePin = None,
        like: opt.Like = None,
        forbid: opt.Forbid = None,
        output: opt.Output = None,
        report: opt.Report = None,
        vary: opt.Vary = True,
        trace: opt.Trace = None,
        json: opt.Json = False,
    ) -> None:
        request = Request(
            model=model, gpus=gpus, gpu=gpu, gpus_per_node=gpus_per_node, stack=stack, cluster_file=cluster,
            global_batches=sizes_of(global_batch, "--global-batch"), seqs=sizes_of(seq, "--seq"),
            shares=shares_of(shares), lengths=lengths, pack=pack, pp=pp, dp=dp, tp=tp, cp=cp, ep=ep, sp=sp, zero=zero,
            shard=shard, reshard=reshard, prefetch=prefetch, offload=offload,
            sequence_layout=sequence_layout, schedule=schedule, virtual_stages=virtual_stages, microbatch=microbatch,
            num_microbatches=num_microbatches, expert_capacity=expert_capacity, expert_load=expert_load,
            precision=precision, remat=remat, activation_memory=activation_memory, fit_probability=fit_probability,
            constrain=tuple(constrain or ()), recipe=tuple(recipe or ()), like=like, forbid=tuple(forbid or ()),
            output=output, report=report, vary=vary, trace=trace, json=json, pin_degrees=pin_degrees,
        )  # fmt: skip
        if request.has_several_sizes:
            run_sizes(request)
        else:
            request.run()

    return command


app.command(
    "search",
    help="Find the fastest plan that fits. Needs no GPU and no weights.",
    epilog=_example(
        "autopar search examples/gpt.py --gpus 16",
        "autopar search examples/llama3_70b.py --gpus 64 --gpu a100-80gb --global-batch 512 --seq 4096 -o plan.yaml",
        "autopar search examples/llama3_70b.py --gpus 64 --global-batch 256:1024 --seq 2048,8192 --shares 0.8,0.2",
        "autopar search model.py:large --gpus 32 --tp 8 --report plan.html",
    ),
)(_planner(pin_degrees=False))
app.command(
    "estimate",
    help="Predict one configuration: degrees not given are 1, and data parallelism takes the ranks left over.",
    epilog=_example(
        "autopar estimate examples/llama3_70b.py --gpus 64 --gpu a100-80gb --tp 8 --pp 2 --dp 4",
        "autopar estimate examples/gpt.py --gpus 8 --zero 3 --json",
    ),
)(_planner(pin_degrees=True))


app.command(
    epilog=_example(
        "autopar lengths stdlib",
        "autopar lengths 'tokens/*.npy' --end-of-document 2 -o lengths.json",
        "autopar search model.py --gpus 8 --seq 8192 --lengths lengths.json",
    )
)(lengths)


@app.command(epilog=_example("autopar show plan.yaml", "autopar show plan.yaml --json"))
def show(plan: opt.PlanFile, json: opt.Json = False) -> None:
    """Print a plan."""
    from autopar.report.terminal import print_plan

    loaded = Plan.load(plan)
    if json:
        print_json(loaded.model_dump_json(indent=2, exclude_none=True))
        return
    print_plan(loaded, whole=True)


@app.command(
    epilog=_example(
        "autopar report plan.yaml",
        "autopar report plan.yaml -o out/plan.html --model examples/gpt.py",
    )
)
def report(
    plan: opt.PlanFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="the page to write; else beside the plan, as .html")
    ] = None,
    model: opt.ModelOfPlan = None,
    seq: opt.Seq = None,
    cluster: opt.ClusterFile = None,
    json: opt.Json = False,
) -> None:
    """Write a page about a plan: what it does to each op, what that communicates, the step and its memory over time."""
    from autopar.cli.report import run_report

    run_report(plan, output or plan.with_suffix(".html"), model=model, seq=seq, cluster_file=cluster, json=json)


@app.command(
    epilog=_example(
        "autopar explain plan.yaml",
        "autopar explain plan.yaml --critical-path",
        "autopar explain plan.yaml mlp.up/linear",
        "autopar explain plan.yaml 'layers.*/mlp.up/linear' --model examples/gpt.py --json",
    )
)
def explain(
    plan: opt.PlanFile,
    op: Annotated[str | None, typer.Argument(metavar="[OP]", help="as the plan names it, or BLOCK/OP")] = None,
    model: opt.ModelOfPlan = None,
    seq: opt.Seq = None,
    cluster: opt.ClusterFile = None,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="the ops, collectives and sends that the step waits for")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Say what a plan communicates, what its step waits for, or why an op is placed so and what else it would cost."""
    from autopar.cli.explain import run_critical_path, run_explain

    if critical_path:
        run_critical_path(plan, op, model=model, seq=seq, cluster_file=cluster, json=json)
    else:
        run_explain(plan, op, model=model, seq=seq, cluster_file=cluster, json=json)


@app.command(
    epilog=_example(
        "autopar compare plan.yaml other_plan.yaml",
        "autopar compare a.yaml b.yaml --json",
        "autopar compare mine.yaml experts.yaml --stack autopar --stack megatron-core-2025",
    )
)
def compare(
    first: opt.PlanFile,
    second: opt.PlanFile,
    stack: Annotated[
        list[str] | None, typer.Option("--stack", help="predict both plans on this software too; may be repeated")
    ] = None,
    model: opt.ModelOfPlan = None,
    cluster: opt.ClusterFile = None,
    json: opt.Json = False,
) -> None:
    """Lay two plans side by side: which is faster, what that comes from, and what they place differently."""
    from autopar.cli.compare import run_compare

    run_compare(first, second, stacks=tuple(stack or ()), model=model, cluster_file=cluster, json=json)


@app.command(
    epilog=_example(
        "autopar check examples/gpt.py plan.yaml",
        "autopar check examples/llama3_70b.py plan.yaml --seq 8192 --ranks 0,7,1023",
    )
)
def check(
    model: opt.Model,
    plan: opt.PlanFile,
    seq: opt.Seq = None,
    ranks: Annotated[str | None, typer.Option("--ranks", help="also run these, as in 0,7,1023")] = None,
    cluster: opt.ClusterFile = None,
    json: opt.Json = False,
) -> None:
    """Run ranks of a plan on fake tensors, without its devices: do they agree, do they fit. Exit code 1 if not."""
    gc.enable()
    from autopar.cli.check import run_check

    if not run_check(model, plan, seq=seq, ranks=ranks, cluster_file=cluster, json=json):
        raise typer.Exit(1)


@app.command(
    epilog=_example(
        "autopar partition examples/gpt.py plan.yaml --rank 5",
        "autopar partition examples/gpt.py plan.yaml --print-after insert-redistributions",
    )
)
def partition(
    model: opt.Model,
    plan: opt.PlanFile,
    rank: Annotated[int, typer.Option("--rank", help="rank whose program is printed")] = 0,
    print_after: Annotated[
        str | None, typer.Option("--print-after", metavar="PASS", help="the program after this pass instead")
    ] = None,
    seq: opt.Seq = None,
) -> None:
    """Print the program that one rank runs: ops on local shapes, with their collectives."""
    from autopar.cli.partition import run_partition

    print(run_partition(model, plan, rank=rank, print_after=print_after, seq=seq))


@app.command(
    epilog=_example(
        "torchrun --nproc-per-node 8 -m autopar profile -o cluster.yaml",
        "autopar search model.py --cluster cluster.yaml",
    )
)
def profile(
    output: Annotated[Path, typer.Option("-o", "--output", help="the cluster file to write")] = Path("cluster.yaml"),
    like: Annotated[
        str | None, typer.Option("--like", help="similar GPU, for one that is not in the catalogue")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.001, help="spent on each measurement")] = 0.2,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", metavar="FOLDER", help="on a local disk, which is measured too"),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="page of measured against fitted")] = None,
    json: opt.Json = False,
) -> None:
    """Measure this machine, with every rank that torchrun starts, and write a cluster file."""
    gc.enable()
    from autopar.cli.profile import run_profile

    run_profile(output, like=like, seconds=seconds, disk=disk, report=report, json=json)


@app.command(
    epilog=_example(
        "autopar export plan.yaml --to deepspeed -o ds_config.json",
        "autopar export plan.yaml --to megatron | less",
        "autopar export plan.yaml --to slurm --model examples/gpt.py --steps 5000 -o train.sbatch",
        "autopar export plan.yaml --to pytorchjob --image registry/trainer:1 | kubectl apply -f -",
    )
)
def export(
    plan: opt.PlanFile,
    to: opt.To,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write here, a file or a folder, instead of printing")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="MODEL, if the plan does not say it")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="training steps of a job")] = 1000,
    image: Annotated[str | None, typer.Option("--image", help="container image of a job")] = None,
    claim: Annotated[
        str | None, typer.Option("--claim", help="persistent volume claim with the checkpoints of a job")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="what the step takes on the software that the target runs")
    ] = True,
    json: opt.Json = False,
) -> None:
    """Write a plan as another system takes it, and say what of it is lost: a configuration, code, or a job."""
    from autopar.cli.export import run_export

    run_export(plan, to, output=output, model=model, steps=steps, image=image, claim=claim, predict=predict, json=json)


app.command(
    epilog=_example(
        "autopar train examples/gpt.py plan.yaml --steps 30 --compare-single",
        "autopar train examples/gpt.py plan.yaml --data src/ --steps 90 --save run --save-every 30",
        "autopar train examples/gpt.py other_plan.yaml --data src/ --steps 120 --resume run",
        "torchrun --nnodes 2 --nproc-per-node 8 ... -m autopar train examples/gpt.py plan.yaml",
        "autopar train examples/gpt.py plan.yaml --ray auto",
    )
)(train)


def run() -> None:
    """The program's entry point: errors of ours are one message and exit code 2."""
    try:
        app()
    except AutoparError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}")
        sys.exit(2)
