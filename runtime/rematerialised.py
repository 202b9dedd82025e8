"""Rematerialisation: the tensors that a block's function saves for backward, and the ops that are recomputed.

    none        saves everything that autograd saves
    selective   saves results of contractions, of reductions and all-to-alls between ranks, and the block's inputs; all
                other ops are recomputed, gathers from other ranks too
    alternate   the same without every second matrix product, which is recomputed
    full        saves the block's inputs
    listed      saves what the plan lists, and the block's inputs; the rest is recomputed if anything needs it. The plan
                may have some of it wait in host memory (``autopar.runtime.host_activations``)

A loss in chunks (``ir/lowered/chunked_loss.py``) makes its gradients forward; they are saved at every level.

Where only a reduction or an all-to-all reads the result of a matrix product, the result of the collective is saved
instead. In recomputation nobody reads the product, so it does not run (``autopar.runtime.kept_results``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.ir.analysis.matrix_products import every_second, is_product
from autopar.ir.lowered.reductions import split_bias
from autopar.ir.ops.narrow_collectives import narrow_all_gather, narrowing_reduce_scatter
from autopar.ir.placed.recomputed import Recomputation
from autopar.ir.primitives.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autopar.ir.rematerialisation import Remat
from autopar.ir.torch_private import OpOverload
from autopar.runtime.kept_results import Mark, Runs, is_costly, marked, named
from autopar.runtime.recomputation import Waiting, recomputed
from autopar.runtime.split_activations import held

# Key of a note in a compiler's graph.
_NOTE = "autopar"


def rematerialised(
    call: Callable[..., Any],
    *,
    remat: Remat,
    preserve_rng_state: bool,
    compiled: bool = False,
    keeps_work: bool = False,
    splits_backward: bool = False,
    waiting: Waiting | None = None,
) -> Callable[..., Any]:
    """``call`` at a level of rematerialisation. preserve_rng_state: it draws random numbers. compiled: it will be.

    keeps_work: what is ``computed_once`` is saved though nothing else is. splits_backward: whether its backward may run
    in an input-gradient and a weight-gradient pass; it is not compiled then. waiting: what of it waits in host memory;
    it is not compiled then either.
    """
    if remat == "none":
        return held(call) if splits_backward else call
    if not compiled:
        contexts = Runs().contexts if remat != "full" or keeps_work else None
        return recomputed(call, preserve_rng_state=preserve_rng_state, contexts=contexts, waiting=waiting)
    # The compiler knows torch's checkpoint alone; it finds out itself what nobody reads.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if remat in _POLICIES:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _POLICIES[remat])

    def run(*args: Tensor) -> Any:
        return checkpoint(call, *args, **options) if torch.is_grad_enabled() else call(*args)

    return run


def mark(graph: fx.Graph, remat: Remat, *, compiled: bool) -> None:
    """Wrap, in place, the calls in ``graph`` that make what is saved, or what nobody reads in backward. compiled: it
    will be, by a compiler that finds out itself what nobody reads."""
    if remat == "listed":
        for node in graph.nodes:
            own = _LISTED.get(node.meta.get("recomputation", Recomputation.RUNS))
            if own is not None and compiled:
                node.target = _annotated(node.target, own.kept)
            elif own is not None and own.kept != "none":
                on_host = bool(node.meta.get("on_host", False))
                node.target = marked(node.target, replace(own, on_host=on_host))
            elif own is not None:
                is_unread_product = own.unread == "all" and is_product(_product_of(node))
                node.target = marked(node.target, Mark(unread="products") if is_unread_product else own)
        return
    if compiled or remat not in ("selective", "alternate"):
        return
    sums = {all_reduce, reduce_scatter, narrowing_reduce_scatter, all_to_all}
    products = [node for node in graph.nodes if is_product(_product_of(node))]
    unread = {node for node in products if node.users and all(user.target in sums for user in node.users)}
    recomputed = set(every_second(products)) if remat == "alternate" else set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node in unread:
            node.target = marked(node.target, Mark(kept="reductions", unread="products"))
        elif node.target in (all_gather, narrow_all_gather) or node in recomputed:
            node.target = marked(node.target, Mark(kept="reductions"))
        elif _may_be_costly(node.target):
            node.target = marked(node.target, Mark(kept="costly"))


def _product_of(node: fx.Node) -> Any:
    """The op that a call runs, if it is a product and its bias apart that product."""
    return node.args[0] if node.target is split_bias else node.target


def _may_be_costly(target: Any) -> bool:
    """Whether some kernel of a call may be costly."""
    if isinstance(target, OpOverload):
        return not target.is_view and torch.Tag.pointwise not in target.tags
    return target is not operator.getitem


@cache
def _annotated(target: Callable[..., Any], kept: str) -> Callable[..., Any]:
    """``target``, with a note for the policy of what a compiler traces."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({_NOTE: kept}):
            return target(*args, **kwargs)

    return named(call, target, f"{kept} kept")


def _keep_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_costly(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_listed(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    noted = Mark(kept=traceback.current_meta.get("custom", {}).get(_NOTE, "none"))
    return CheckpointPolicy.MUST_SAVE if noted.keeps(op) else CheckpointPolicy.PREFER_RECOMPUTE


_POLICIES: dict[Remat, Callable[..., CheckpointPolicy]] = {"selective": _keep_costly, "listed": _keep_listed}
_LISTED = {
    Recomputation.KEPT: Mark(kept="all"),
    Recomputation.PRODUCTS_KEPT: Mark(kept="costly"),
    Recomputation.UNREAD: Mark(unread="all"),
}
