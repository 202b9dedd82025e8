"""The pass manager of captured models: passes run in order, and what comes out is verified and reported.

A pass is given a graph that it may edit, a copy of the model's. Dead ops are removed after it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.building import remove_dead
from autopar.ir.errors import AutoparError
from autopar.ir.graph import CapturedModel, call_nodes, copy_captured
from autopar.passes.contract import Pass, check_order
from autopar.passes.verify.well_formed import Memo, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """The effect of a pass: op counts before and after, by op name, where they differ."""

    name: str
    seconds: float
    num_ops: int
    removed: dict[str, int]
    added: dict[str, int]

    def __str__(self) -> str:
        changes = [f"-{n} {op}" for op, n in self.removed.items()] + [f"+{n} {op}" for op, n in self.added.items()]
        return f"{self.name}: {self.num_ops} ops in {self.seconds:.2f} s; {', '.join(changes) or 'no change'}"


def run_passes(
    captured: CapturedModel,
    passes: Sequence[Pass[CapturedModel]],
    *,
    check: bool = True,
    report: Callable[[PassReport], None] | None = None,
    after: Callable[[str, CapturedModel], None] = lambda name, captured: None,
) -> CapturedModel:
    """Apply passes to a copy of a captured model, after a check of their contracts.

    check: verify the result; where that fails, or a pass does, they run again with a check after each, so that the
    AssertionError names the first that left the graph in disorder. report: called after each pass. after: called with
    the name of each pass and the model that it leaves, which the next one may edit.
    """
    check_order(passes)
    try:
        done = _run(captured, passes, report=report, after=after)
        if check:
            verify(done, after=passes[-1].name if passes else "capture")
    except AutoparError:
        raise
    except Exception:
        # Whatever a pass makes of a graph that one before it broke: the first one is named, else the error stands.
        if check:
            _run(captured, passes, memo=Memo())
        raise
    done.graph_module.recompile()
    return done


def _run(
    captured: CapturedModel,
    passes: Sequence[Pass[CapturedModel]],
    *,
    memo: Memo | None = None,
    report: Callable[[PassReport], None] | None = None,
    after: Callable[[str, CapturedModel], None] = lambda name, captured: None,
) -> CapturedModel:
    """memo: verify before the first and after every pass, with it."""
    captured = copy_captured(captured)
    if memo is not None:
        verify(captured, memo=memo)
    for step in passes:
        before = _counts(captured) if report is not None else Counter()
        start = time.perf_counter()
        captured = step.apply(captured)
        remove_dead(captured.graph)
        captured = with_updates(captured)
        seconds = time.perf_counter() - start
        if memo is not None:
            verify(captured, after=step.name, memo=memo)
        if report is not None:
            left = _counts(captured)
            report(
                PassReport(
                    name=step.name,
                    seconds=seconds,
                    num_ops=left.total(),
                    removed=dict(before - left),
                    added=dict(left - before),
                )
            )
        after(step.name, captured)
    return captured


def with_updates(captured: CapturedModel) -> CapturedModel:
    """The model with ``Buffer.updated_by`` naming the nodes that its graph returns now."""
    updated = [name for name, buffer in captured.buffers.items() if buffer.updated_by is not None]
    if not updated:
        return captured
    tail = captured.output_args()[-len(updated) :]
    buffers = dict(captured.buffers)
    for name, value in zip(updated, tail, strict=True):
        buffers[name] = replace(buffers[name], updated_by=value.name)
    return replace(captured, buffers=buffers)


def _counts(captured: CapturedModel) -> Counter[str]:
    return Counter(getattr(node.target, "__name__", str(node.target)) for node in call_nodes(captured.graph))
