"""Options that commands share, as annotated types for typer."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.json_output import reserve

_SIZE = "Model and batch"
_CLUSTER = "Cluster"
_PIN = "Pin what the search would choose"
_OUT = "Output"


class Switch(str, Enum):
    """Values of a flag that can be left open."""

    on = "on"
    off = "off"


class OffloadPlace(str, Enum):
    """Values of ``--offload``."""

    off = "off"
    on = "on"
    disk = "disk"


class SequenceLayoutName(str, Enum):
    """Values of ``--sequence-layout``."""

    contiguous = "contiguous"
    zigzag = "zigzag"


class ScheduleName(str, Enum):
    """Values of ``--schedule``."""

    naive = "naive"
    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    zb_h1 = "zb-h1"
    zb_2p = "zb-2p"
    zb_v = "zb-v"
    dualpipe_v = "dualpipe-v"
    found = "found"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="file.py (with model() and example_inputs(batch_size, seq_len)), file.py:name, or hf:path/to/config.json",
        show_default=False,
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan written by autopar search", show_default=False)]

ModelOfPlan = Annotated[str | None, typer.Option("--model", help="MODEL, if the plan does not say it")]

GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, help="samples a step; the model file's default", rich_help_panel=_SIZE),
]
Seq = Annotated[
    int | None, typer.Option("--seq", min=1, help="sequence length; the model file's default", rich_help_panel=_SIZE)
]

GlobalBatches = Annotated[
    str | None,
    typer.Option(
        "--global-batch",
        metavar="N[,N..] | N:N",
        help="samples a step, or several: 256,512, or 256:4096 for doublings; the model file's default",
        rich_help_panel=_SIZE,
    ),
]
Seqs = Annotated[
    str | None,
    typer.Option(
        "--seq",
        metavar="N[,N..] | N:N",
        help="sequence length, or several: 2048,8192, or 2048:8192 for doublings; the model file's default",
        rich_help_panel=_SIZE,
    ),
]
Shares = Annotated[
    str | None,
    typer.Option(
        "--shares",
        metavar="S[,S..]",
        help="shares of the steps that have each length of --seq; equal ones if not given",
        rich_help_panel=_SIZE,
    ),
]

Lengths = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="histogram of the lengths of documents, as autopar lengths writes it: predict steps on such documents",
        rich_help_panel=_SIZE,
    ),
]
Pack = Annotated[
    bool | None,
    typer.Option(
        "--pack/--pad",
        help="documents packed into rows of --seq tokens, or one a row; packed where attention keeps them apart",
        rich_help_panel=_SIZE,
    ),
]

Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="number of GPUs", rich_help_panel=_CLUSTER)]
Gpu = Annotated[str | None, typer.Option("--gpu", help="GPU type, h100-sxm if not given", rich_help_panel=_CLUSTER)]
GpusPerNode = Annotated[
    int | None,
    typer.Option("--gpus-per-node", min=1, help="as it comes; a share of racks", rich_help_panel=_CLUSTER),
]
Stack = Annotated[
    str | None,
    typer.Option("--stack", help="software whose kernels are priced, autopar if not given", rich_help_panel=_CLUSTER),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="YAML file that describes the cluster", rich_help_panel=_CLUSTER)
]

Pp = Annotated[int | None, typer.Option("--pp", min=1, help="ranks of the pipeline", rich_help_panel=_PIN)]
Dp = Annotated[int | None, typer.Option("--dp", min=1, help="data parallelism", rich_help_panel=_PIN)]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="tensor parallelism", rich_help_panel=_PIN)]
Cp = Annotated[int | None, typer.Option("--cp", min=1, help="context parallelism", rich_help_panel=_PIN)]
Ep = Annotated[
    int | None,
    typer.Option(
        "--ep",
        min=1,
        help="expert parallelism: ranks that experts are spread over, of tensor and context ranks too if need be",
        rich_help_panel=_PIN,
    ),
]
Sp = Annotated[
    Switch | None, typer.Option("--sp", help="may tensor axes shard the sequence between blocks", rich_help_panel=_PIN)
]
Zero = Annotated[
    int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage over data axes", rich_help_panel=_PIN)
]
Shard = Annotated[
    int | None,
    typer.Option("--shard", min=1, help="data ranks ZeRO shards over; the others replicate", rich_help_panel=_PIN),
]
SequenceLayout = Annotated[
    SequenceLayoutName | None,
    typer.Option("--sequence-layout", help="order of a sequence that ranks share", rich_help_panel=_PIN),
]
Reshard = Annotated[
    Switch | None,
    typer.Option("--reshard", help="does ZeRO-3 give parameters back after forward", rich_help_panel=_PIN),
]
Prefetch = Annotated[
    int | None, typer.Option("--prefetch", min=1, help="blocks ZeRO-3 gathers ahead", rich_help_panel=_PIN)
]
Offload = Annotated[
    OffloadPlace | None,
    typer.Option(
        "--offload",
        help="what ZeRO shards, on every stage: on for host memory, disk for files on a local disk",
        rich_help_panel=_PIN,
    ),
]
Schedule = Annotated[ScheduleName | None, typer.Option("--schedule", help="of the pipeline", rich_help_panel=_PIN)]
VirtualStages = Annotated[
    int | None, typer.Option("--virtual-stages", min=1, help="stages a pipeline rank", rich_help_panel=_PIN)
]
Microbatch = Annotated[
    int | None, typer.Option("--microbatch", min=1, help="samples a microbatch and rank, at most", rich_help_panel=_PIN)
]
NumMicrobatches = Annotated[
    int | None, typer.Option("--num-microbatches", min=1, help="pieces of the batch", rich_help_panel=_PIN)
]
ExpertCapacity = Annotated[
    float | None,
    typer.Option(
        "--expert-capacity", min=0.0, help="even shares of tokens that an expert takes at most", rich_help_panel=_PIN
    ),
]
ExpertLoad = Annotated[
    Path | None,
    typer.Option(
        "--expert-load",
        help="JSON of a run's tokens by layer and expert, as expert_load() counts them; even if not given",
        rich_help_panel=_PIN,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="of compute: fp32, bf16, fp16, or narrower floats by fp8-tensor, fp8-row, fp8-block, mxfp8 or nvfp4; "
        "bf16,fp8-row: the faster for each product; bf16 on GPUs, fp32 on cpu if not given",
        metavar="NAME",
        rich_help_panel=_PIN,
    ),
]
Remat = Annotated[
    str | None,
    typer.Option(
        "--remat",
        help="rematerialisation of every block: none, selective, alternate, full, or the share that a block keeps at "
        "most of what autograd would save, as in 40%",
        metavar="LEVEL",
        rich_help_panel=_PIN,
    ),
]

ActivationMemory = Annotated[
    str | None,
    typer.Option(
        "--activation-memory",
        help="most that a rank keeps for its backward, as in 20GiB",
        metavar="SIZE",
        rich_help_panel=_PIN,
    ),
]

FitProbability = Annotated[
    float | None,
    typer.Option("--fit-probability", help="least, that a plan fits", min=0.001, max=0.999, rich_help_panel=_PIN),
]

Constrain = Annotated[
    list[str] | None,
    typer.Option(
        "--constrain",
        metavar="'PATTERN: AXIS=DIM ...'",
        help="placement of parameters, as in '*.up.weight: tp=0'; * for replicated",
        rich_help_panel=_PIN,
    ),
]

RecipePin = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="'PATTERN: RECIPE'",
        help="of linear layers by their weights, before what is found by rule, as in '*.down.weight: bf16'",
        rich_help_panel=_PIN,
    ),
]

Like = Annotated[
    Path | None,
    typer.Option(
        "--like",
        metavar="PLAN",
        help="mesh, pipeline, schedule, microbatches and ZeRO as in this plan",
        rich_help_panel=_PIN,
    ),
]
Forbid = Annotated[
    list[str] | None,
    typer.Option(
        "--forbid",
        metavar="'OP: AXIS=FACTOR ...'",
        help="a placement that an op may not have, as in 'mlp.up/linear: tp=n'; * for replicated",
        rich_help_panel=_PIN,
    ),
]

Output = Annotated[Path | None, typer.Option("-o", "--output", help="write the plan here", rich_help_panel=_OUT)]
Report = Annotated[Path | None, typer.Option("--report", help="write a page about it here", rich_help_panel=_OUT)]
Vary = Annotated[
    bool,
    typer.Option(
        "--vary/--no-vary",
        help="for the page, search the best plans of other networks, memories and batches too",
        rich_help_panel=_OUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="write the predicted step here, for Perfetto or Chrome", rich_help_panel=_OUT),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="TARGET",
        help="megatron, torchtitan, deepspeed, fsdp, accelerate, slurm, pytorchjob, rayjob or perfetto",
        show_default=False,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", callback=reserve, help="print one JSON object instead", rich_help_panel=_OUT),
]
# For a command whose ranks print: they inherit its standard output.
JsonOfRanks = Annotated[bool, typer.Option("--json", help="print one JSON object instead", rich_help_panel=_OUT)]
