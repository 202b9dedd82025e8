"""Does ``autopar check`` find what is wrong with a plan for 1,024 GPUs, and how long does it take?

    python benchmarks/check.py [--model examples/llama3_8b.py] [--limits "--pp 2 --tp 4"] [--only "right;missing"]

A plan is searched once. Then the command runs in a process of its own for every fault that is planted. Faults of
communication are those of a program that the passes made wrong for one rank: between partition and execution, the
program of one rank of the last stage is altered. Too little memory is planted by taking rematerialisation out of the
plan, or by a cluster whose devices have less. Printed: seconds from the start of the process, the exit status, and what
the command says. Exits with 1 if a fault is not found, or one is found in the plan as it is.
"""

from __future__ import annotations

import argparse
import copy
import operator
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import fx, nn

from autopar.checking import check
from autopar.checking.ranks import Programs, RankTrace, run_ranks
from autopar.cli.main import main as autopar
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.primitives.collectives import COLLECTIVES, divide, identity, split
from autopar.ir.program import StageProgram

ROOT = Path(__file__).parents[1]
MODEL, SEQ = ROOT / "examples" / "llama3_8b.py", 4096
# A plan that only fits because everything is rematerialised.
LIMITS = "--tp 4 --pp 1 --zero 1 --remat full --microbatch 16"
AGREES, UNFIT, SMALL = "agree", "communications do not fit together", "is out of memory"


@dataclass(frozen=True, slots=True)
class Fault:
    """alter: changes the first collective of a block, in a graph of its own. says: what the command prints, and
    status its exit status: 2 where the program of the rank cannot even run.
    """

    alter: Callable[[fx.Node, Plan], None] | None = None
    says: tuple[str, ...] = (AGREES,)
    without_remat: bool = False
    memory: float | None = None
    status: int = 1


def _missing(node: fx.Node, plan: Plan) -> None:
    """Memory of the right shape in its place."""
    value = node.meta["val"]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(
            torch.ops.aten.empty.memory_format, (list(value.shape),), {"dtype": value.dtype}
        )
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _twice(node: fx.Node, plan: Plan) -> None:
    with node.graph.inserting_after(node):
        again = node.graph.call_function(node.target, node.args, dict(node.kwargs))
    again.meta.update(node.meta)
    with node.graph.inserting_after(again):
        both = node.graph.call_function(torch.ops.aten.add.Tensor, (node, again))
    both.meta.update(node.meta)
    node.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)


def _wide(node: fx.Node, plan: Plan) -> None:
    (operand,) = node.args
    assert isinstance(operand, fx.Node)
    with node.graph.inserting_before(node):
        wide = node.graph.call_function(torch.ops.aten.to.dtype, (operand, torch.float32))
    wide.meta.update(operand.meta)
    node.args = (wide,)
    with node.graph.inserting_after(node):
        narrow = node.graph.call_function(torch.ops.aten.to.dtype, (node, torch.bfloat16))
    narrow.meta.update(node.meta)
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)


def _shorter(node: fx.Node, plan: Plan) -> None:
    """Half of the numbers, then doubled again."""
    (operand,) = node.args
    assert isinstance(operand, fx.Node)
    with node.graph.inserting_before(node):
        half = node.graph.call_function(torch.ops.aten.chunk.default, (operand, 2, -1))
        first = node.graph.call_function(torch.ops.aten.contiguous.default, (_first(half),))
    node.args = (first,)
    with node.graph.inserting_after(node):
        whole = node.graph.call_function(torch.ops.aten.cat.default, ([node, node], -1))
    whole.meta.update(node.meta)
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _first(pair: fx.Node) -> fx.Node:
    return pair.graph.call_function(operator.getitem, (pair, 0))


def _elsewhere(node: fx.Node, plan: Plan) -> None:
    """The same over another axis of the mesh that has as many ranks, or any other."""
    own = str(node.kwargs["group"])
    size = plan.mesh[own]
    others = sorted((name for name in plan.mesh if name != own), key=lambda name: (plan.mesh[name] != size, name))
    node.kwargs = {**node.kwargs, "group": others[0]}


FAULTS = {
    "right": Fault(status=0),
    "missing": Fault(_missing, (UNFIT,)),
    "twice": Fault(_twice, (UNFIT,)),
    "dtype": Fault(_wide, (UNFIT, "float32", "bfloat16")),
    "shape": Fault(_shorter, (UNFIT,)),
    # Over another number of ranks, what comes out has another shape.
    "group": Fault(_elsewhere, ("cannot run its program",), status=2),
    "no remat": Fault(says=(SMALL, "GiB", "try:"), without_remat=True),
    "small devices": Fault(says=(SMALL, "GiB", "try:"), memory=0.6),
}


def _altered(program: StageProgram, plan: Plan, alter: Callable[[fx.Node, Plan], None]) -> StageProgram:
    """``program`` with the first collective of its last block but one that has some altered."""
    blocks = list(program.blocks)
    moving = COLLECTIVES - {identity, divide, split}
    for number in reversed(range(len(blocks))):
        block = blocks[number]
        if any(node.target in moving for node in block.graph.nodes):
            copied = copy.deepcopy(block.graph)
            alter(next(node for node in copied.nodes if node.target in moving), plan)
            copied.lint()
            blocks[number] = replace(block, graph=copied)
            return replace(program, blocks=tuple(blocks))
    raise AssertionError("there is no collective in the stage")


def _command(fault: str, rank: int, arguments: Sequence[str]) -> None:
    """``autopar check`` in this process, with the program of ``rank`` altered."""
    alter = FAULTS[fault].alter

    def run_altered(
        build: Callable[[], nn.Module], captured: CapturedModel, plan: Plan, programs: Programs, ranks: Sequence[int]
    ) -> list[RankTrace]:
        def of(number: int) -> Sequence[StageProgram]:
            made = programs(number)
            return made if alter is None or number != rank else (*made[:-1], _altered(made[-1], plan, alter))

        return run_ranks(build, captured, plan, of, ranks)

    sys.argv = ["autopar", "check", *arguments]
    with patch.object(check, "run_ranks", run_altered):
        autopar()


def searched(model: str, limits: str, folder: Path) -> Plan:
    """A plan of ``model`` for 1,024 H100 with these flags of the search."""
    path = folder / "plan.yaml"
    sizes = ["--gpu", "h100-sxm", "--gpus", "1024", "--global-batch", "4096", "--seq", str(SEQ)]
    command = [sys.executable, "-W", "ignore", "-m", "autopar", "search", model, *sizes, *limits.split()]
    subprocess.run([*command, "-o", str(path)], check=True)
    return Plan.load(path)


def run(fault: str, model: str, plan: Plan, folder: Path) -> tuple[bool, float, int, str]:
    """Whether the command said what it should, seconds, exit status, and its words."""
    own = FAULTS[fault]
    # The last rank but two: of the last stage, and none of those that are run anyway.
    rank = plan.num_ranks - 3
    if own.without_remat:
        plan = plan.model_copy(update={"stages": [stage.model_copy(update={"remat": {}}) for stage in plan.stages]})
    path = folder / f"{fault.replace(' ', '-')}.yaml"
    plan.save(path)
    arguments = [model, str(path), "--seq", str(SEQ), "--ranks", str(rank)]
    if own.memory is not None:
        small = plan.prediction.peak_memory_bytes * own.memory / 1e9 if plan.prediction else 1.0
        cluster = folder / "cluster.yaml"
        cluster.write_text(
            f"gpu: {plan.cluster.gpu}\nnum_gpus: {plan.num_ranks}\ngpus_per_node: {plan.cluster.gpus_per_node}\n"
            f"memory_gb: {small:.1f}\n"
        )
        arguments += ["--cluster", str(cluster)]
    start = time.perf_counter()
    child = [sys.executable, "-W", "ignore", __file__, "--command", fault, str(rank), *arguments]
    done = subprocess.run(child, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    said = done.stderr if own.status == 2 else done.stdout
    wanted = own.says if own.alter is None else (*own.says, f"rank {rank}")
    right = done.returncode == own.status and all(words in " ".join(said.split()) for words in wanted)
    return right, seconds, done.returncode, done.stdout if done.stdout.strip() else done.stderr


def main() -> int:
    if sys.argv[1:2] == ["--command"]:
        _command(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--plan", type=Path, help="instead of a search")
    parser.add_argument("--limits", default=LIMITS, help="more flags of the search")
    parser.add_argument("--only", help="fault;...")
    options = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = Plan.load(options.plan) if options.plan else searched(options.model, options.limits, folder)
        for fault in options.only.split(";") if options.only else FAULTS:
            right, seconds, status, said = run(fault, options.model, plan, folder)
            missed |= not right
            print(f"== {fault}: {'as it should' if right else 'NOT AS IT SHOULD'}, {seconds:.1f} s, exit {status}")
            print(said, flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
