"""What one rank of a pipeline holds in each pass of a step, by category, as it is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.memory.model_state import MemoryParts
from autopar.ir.graph import CapturedModel
from autopar.ir.schedule import Action
from autopar.search.api import estimate_captured
from autopar.search.problem.constraints import Constraints
from scripts.architecture.llama import llama
from scripts.architecture.svg import Picture

GPUS, GPU, RANK = 64, "h100-sxm", 0
PINNED = Constraints(pp=4, tp=4, dp=4, num_microbatches=16, zero=1, precision="bf16", sequence_parallel=True)
GIB = 2**30
WIDTH, LEFT, RIGHT, TOP, TALL = 900.0, 56.0, 24.0, 118.0, 320.0
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "transient", "workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """passes: of the rank, with start and end in seconds and the bytes that it holds. may_hold: bytes. of: the plan."""

    passes: tuple[tuple[Action, float, float, MemoryParts], ...]
    step_time_s: float
    may_hold: float
    of: str

    @property
    def peak(self) -> int:
        """The number of the first pass with the most bytes."""
        return max(range(len(self.passes)), key=lambda number: self.passes[number][3].total)


def profile(captured: CapturedModel, num_gpus: int = GPUS, gpu: str = GPU, pinned: Constraints = PINNED) -> Profile:
    """Of rank 0 of the pipeline."""
    cluster = make_cluster(gpu, num_gpus)
    found = estimate_captured(captured, cluster, pinned)
    predicted, plan = found.predicted, found.plan
    profile, events = predicted.memory_profile(RANK), predicted.timeline.events[RANK]
    assert [action for action, _ in profile] == [event.action for event in events]
    return Profile(
        passes=tuple((e.action, e.start_s, e.end_s, parts) for e, (_, parts) in zip(events, profile)),
        step_time_s=predicted.step_time_s,
        may_hold=cluster.device.usable_bytes * pinned.memory_share,
        of=f"{captured.name} on {num_gpus} {cluster.device.name}: {plan.num_stages} stages on {plan.stage_mesh}, "
        f"{plan.schedule}, {plan.batch.num_microbatches} microbatches, ZeRO-{plan.zero}",
    )


def draw() -> Picture:
    return drawn(profile(llama()))


def drawn(found: Profile) -> Picture:
    peak = found.passes[found.peak]
    picture = Picture(
        title=f"Memory of stage {peak[0].stage} over a step",
        description=f"{found.of}; at most {peak[3].total / GIB:.1f} GiB, in {peak[0]}",
        width=WIDTH,
        height=TOP + TALL + 58,
    )
    picture.text(24, 34, picture.title, "bold", size=17)
    picture.text(24, 54, found.of, "soft")
    wide, top = WIDTH - LEFT - RIGHT, max(found.may_hold, peak[3].total) / GIB * 1.08

    def x(seconds: float) -> float:
        return LEFT + wide * seconds / found.step_time_s

    def y(num_bytes: float) -> float:
        return TOP + TALL * (1 - num_bytes / GIB / top)

    _legend(picture, peak[3])
    for gib in range(0, int(top) + 1, 10):
        picture.line((LEFT, y(gib * GIB)), (WIDTH - RIGHT, y(gib * GIB)), kind="grid")
        picture.text(LEFT - 8, y(gib * GIB) + 4, str(gib), "soft", size=11, anchor="end")
    picture.text(24, TOP - 12, "GiB", "soft", size=11)
    for _, start, end, parts in found.passes:
        base = 0.0
        for number, name in enumerate(CATEGORIES):
            held = getattr(parts, name)
            picture.box(x(start), y(base + held), x(end) - x(start), y(base) - y(base + held), tone=f"part-{number}")
            base += held
    picture.line((LEFT, y(found.may_hold)), (WIDTH - RIGHT, y(found.may_hold)), kind="dashed")
    says = f"a rank may hold {found.may_hold / GIB:.1f}"
    picture.text(WIDTH - RIGHT, y(found.may_hold) - 6, says, "soft", size=11, anchor="end")
    at, high = x((peak[1] + peak[2]) / 2), y(peak[3].total)
    picture.line((at, high - 22), (at, high - 2), arrow=True)
    says = f"peak {peak[3].total / GIB:.1f} GiB, in the {_pass(peak[0])}"
    picture.text(at + 8, high - 14, says, "bold", size=12.5)
    for second in range(int(found.step_time_s) + 1):
        if second % max(1, int(found.step_time_s) // 8) == 0:
            picture.text(x(second), TOP + TALL + 18, f"{second} s", "soft", size=11, anchor="middle")
    says = "each bar is a pass: a forward at its end, a backward at its peak; gaps are bubble, gradient sums, optimiser"
    picture.text(24, TOP + TALL + 42, says, "soft", size=11)
    return picture


def _legend(picture: Picture, parts: MemoryParts) -> None:
    """The categories with their bytes at the peak."""
    x = LEFT
    for number, name in enumerate(CATEGORIES):
        picture.box(x, 70, 12, 12, tone=f"part-{number}")
        says = picture.text(x + 17, 80, f"{name} {getattr(parts, name) / GIB:.1f}", size=12)
        x = says.right + 14


def _pass(action: Action) -> str:
    kind = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}[action.kind]
    return f"{kind} of microbatch {action.microbatch}"
