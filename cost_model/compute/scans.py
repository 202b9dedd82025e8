"""Recurrences that are one op: bytes and launches of the steps of a scan, beside the op's operands and results."""

from __future__ import annotations

from torch import fx

from autopar.ir.graph import op_nodes, tensor_operands, tensor_results
from autopar.ir.ops.scan import AssociativeScan, Scan
from autopar.ir.rules.call import call_of
from autopar.ir.rules.scan import length_of, num_body_runs, work_of_body

# Gradients of the operands are written, and the operands and the gradients of the results are read.
_BACKWARD = 2.0


def is_scan(node: fx.Node) -> bool:
    """Whether an op is a scan, associative or not."""
    return isinstance(node.target, (Scan, AssociativeScan))


def launches_of_scan(node: fx.Node) -> tuple[int, int]:
    """Kernels forward and backward: each op of the body, as often as the body runs."""
    target = node.target
    assert isinstance(target, (Scan, AssociativeScan))
    count = sum(1 for _ in op_nodes(target.body.graph)) * num_body_runs(target, length_of(call_of(node)))
    return max(count, 1), max(2 * count, 1)


def elements_of_scan(node: fx.Node) -> tuple[float, float]:
    """Elements that the ops of the body read and write in all steps, forward and backward."""
    target = node.target
    assert isinstance(target, (Scan, AssociativeScan))
    body = target.body.graph
    moved = sum(
        t.numel()
        for own in op_nodes(body)
        for t in (*(operand.meta["val"] for operand in tensor_operands(own)), *tensor_results(own))
    )
    forward = float(moved) * work_of_body(target, length_of(call_of(node)))
    return forward, _BACKWARD * forward
