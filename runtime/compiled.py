"""``torch.compile`` for the functions of blocks: one compilation for each distinct block.

    def block(w0, x0):                            def body(p0, x0):                      compiled
        w = read_parameter(w0, dtype=bf16)            w = to(p0, bf16)
        return linear(x0, w)                          return linear(x0, w)
                                                  body(read_parameter(w0), x0)

What is compiled takes local tensors: a parameter is a DTensor, or one that FSDP swaps, and is read outside. Under
rematerialisation what is compiled is the checkpointed body, so that the compiler sees what may be computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import fx, nn

from autopar.ir.errors import PlanMismatch
from autopar.ir.plan import Plan
from autopar.ir.primitives.read_parameter import read_parameter


def check_compiles(plan: Plan) -> None:
    """Raise PlanMismatch for a plan whose blocks cannot be compiled."""
    if not plan.splits_backward and any(stage.remat.get("alternate") for stage in plan.stages):
        raise PlanMismatch(
            "the plan rematerialises at level alternate, and the compiler chooses itself which products of a "
            "block are recomputed.\n"
            "  try: compile=False, or a plan with remat selective or full"
        )
    if plan.uses_host:
        raise PlanMismatch(
            "activations of the plan wait in host memory (host of its blocks), which those of compiled blocks cannot.\n"
            "  try: compile=False, or a plan whose blocks have no host"
        )


def compile_block(function: fx.GraphModule, remat: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with everything but its reads of parameters compiled. remat: the rematerialisation around it.

    What cannot be traced (a mixture of experts reads how many tokens chose each) runs between compiled parts.
    """
    body, reads = without_reads(function.graph)
    # A size that changes becomes a symbol: what changes for the first time is compiled once more, and not again.
    has_sizes = any(node.op == "placeholder" and node.name.startswith("s") for node in function.graph.nodes)
    compiled = torch.compile(remat(body.forward), dynamic=None if has_sizes else False)

    def run(*args: torch.Tensor) -> Any:
        return compiled(*[read(args[number]) for number, read in reads])  # type: ignore[no-untyped-call]

    return run


def without_reads(graph: fx.Graph) -> tuple[fx.GraphModule, list[tuple[int, Callable[..., torch.Tensor]]]]:
    """The graph on local tensors; for each of its arguments, the number of one of ``graph`` and how to read it.

    A cast to the dtype of compute stays inside, where the compiler can fuse it.
    """
    body = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    reads: dict[tuple[int, float | None], fx.Node] = {}

    def argument(node: fx.Node, scale: float | None) -> fx.Node:
        key = (arguments.index(node), scale)
        if key not in reads:
            reads[key] = body.placeholder(f"a{len(reads)}")
        return reads[key]

    for node in graph.nodes:
        if _reads(node):
            argument(node.args[0], node.kwargs.get("grad_scale", 1.0))
        elif node.op != "placeholder":
            for operand in node.all_input_nodes:
                if operand.op == "placeholder":
                    copied[operand] = argument(operand, None)
    for node in graph.nodes:
        if _reads(node):
            local = argument(node.args[0], node.kwargs.get("grad_scale", 1.0))
            dtype = node.kwargs.get("dtype")
            copied[node] = local if dtype is None else body.call_method("to", (local, dtype))
        elif node.op != "placeholder":
            copied[node] = body.node_copy(node, lambda n: copied[n])
    module = fx.GraphModule(nn.Module(), body, class_name="Body")
    return module, [
        (number, _as_it_is if scale is None else partial(read_parameter, grad_scale=scale)) for number, scale in reads
    ]


def _reads(node: fx.Node) -> bool:
    """Whether a node reads a parameter; what is kept may have been marked."""
    return node.op == "call_function" and unwrap(node.target) is read_parameter  # type: ignore[arg-type]  # a callable


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value
