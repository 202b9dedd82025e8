"""Rematerialisation: the tensors that a block's function saves for backward, and the ops that are recomputed.

    none        saves everything that autograd saves
    selective   saves results of contractions, of reductions and all-to-alls between ranks, and the block's inputs; all
                other ops are recomputed, gathers from other ranks too
    alternate   the same without every second matrix product, which is recomputed
    full        saves the block's inputs
    listed      saves what the plan lists, and the block's inputs; the rest is recomputed if anything needs it

A loss in chunks (``ir/lowered/chunked_loss.py``) makes its gradients forward; they are saved at every level.

Where only a reduction or an all-to-all reads the result of a matrix product, the result of the collective is saved
instead. In recomputation nobody reads the product, so it does not run:

    forward         s = linear(x, w)        y = all_reduce(s)     y is saved, s is not
    recomputation   s: not a number         y: the saved one      autograd sees both ops

What is not read is not a number there, so that a gradient which reads it after all shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.ir.analysis.matrix_products import every_second, is_product
from autopar.ir.lowered.reductions import split_bias
from autopar.ir.ops.narrow_collectives import narrow_all_gather, narrowing_reduce_scatter
from autopar.ir.placed.recomputed import Recomputation
from autopar.ir.primitives.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autopar.ir.primitives.computed_once import Results, Work, keeping
from autopar.ir.rematerialisation import Remat
from autopar.ir.torch_private import TorchDispatchMode, pytree
from autopar.runtime.split_activations import Contexts, held, recomputed

# What selective rematerialisation keeps: results that are dear to compute or to communicate.
_CONTRACTIONS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2")
_ATTENTION = ("_scaled_dot_product", "flash_attention")
_KEPT_NAMESPACES = ("_c10d_functional", "autopar")

# Key of a note in a compiler's graph.
_NOTE = "autopar"

# Within a call: whether what its kernels make is saved, or what products and collectives make; or is recomputed; or is
# unread, or what products make is.
_Mark = Literal["saved", "products saved", "recomputed", "unread", "product unread"]
_marked_as: ContextVar[_Mark | None] = ContextVar("autopar what becomes of results", default=None)


def rematerialised(
    call: Callable[..., Any],
    *,
    remat: Remat,
    preserve_rng_state: bool,
    compiled: bool = False,
    keeps_work: bool = False,
    splits_backward: bool = False,
) -> Callable[..., Any]:
    """``call`` at a level of rematerialisation. preserve_rng_state: it draws random numbers. compiled: it will be.

    keeps_work: what is ``computed_once`` is saved though nothing else is. splits_backward: whether its backward may run
    in an input-gradient and a weight-gradient pass; it is not compiled then.
    """
    if remat == "none":
        return held(call) if splits_backward else call
    contexts: Contexts | None = None
    if remat != "full" or (keeps_work and not compiled):
        # The compiler knows torch's contexts alone; it finds out itself what nobody reads.
        kept = partial(create_selective_checkpoint_contexts, _POLICIES.get(remat, _keep))
        contexts = kept if compiled else partial(_contexts, kept)
    if splits_backward:
        return recomputed(call, preserve_rng_state=preserve_rng_state, contexts=contexts)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if contexts is not None:
        options["context_fn"] = contexts

    def run(*args: Tensor) -> Any:
        return checkpoint(call, *args, **options) if torch.is_grad_enabled() else call(*args)

    return run


def mark(graph: fx.Graph, remat: Remat, *, compiled: bool) -> None:
    """Wrap, in place, the calls in ``graph`` whose results are saved otherwise than by the rule of ``remat``. compiled:
    it will be, by a compiler that finds out itself what nobody reads."""
    if remat == "listed":
        for node in graph.nodes:
            how = _LISTED.get(node.meta.get("recomputation", Recomputation.RUNS))
            if how is not None and compiled:
                node.target = _annotated(node.target, how)
            elif how == "unread" and is_product(_product_of(node)):
                node.target = _marked(node.target, "product unread")
            elif how is not None:
                node.target = _marked(node.target, how)
        return
    if compiled or remat not in ("selective", "alternate"):
        return
    sums = {all_reduce, reduce_scatter, narrowing_reduce_scatter, all_to_all}
    products = [node for node in graph.nodes if is_product(_product_of(node))]
    unread = {node for node in products if node.users and all(user.target in sums for user in node.users)}
    recomputed = set(every_second(products)) if remat == "alternate" else set()
    for node in graph.nodes:
        if node in unread:
            node.target = _marked(node.target, "product unread")
        elif node.target in (all_gather, narrow_all_gather) or node in recomputed:
            node.target = _marked(node.target, "recomputed")


def _product_of(node: fx.Node) -> Any:
    """The op that a call runs, if it is a product and its bias apart that product."""
    return node.args[0] if node.target is split_bias else node.target


@cache
def _marked(target: Callable[..., Any], how: _Mark) -> Callable[..., Any]:
    """``target``, with its results saved or not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        token = _marked_as.set(how)
        try:
            return target(*args, **kwargs)
        finally:
            _marked_as.reset(token)

    return _named(call, target, how)


@cache
def _annotated(target: Callable[..., Any], how: _Mark) -> Callable[..., Any]:
    """``target``, with a note for the policy of what a compiler traces."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({_NOTE: how}):
            return target(*args, **kwargs)

    return _named(call, target, how)


def _named(call: Callable[..., Any], target: Callable[..., Any], how: _Mark) -> Callable[..., Any]:
    name = f"{how} {getattr(target, '__name__', 'op')}".replace(".", "_").replace(" ", "_")
    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    return call


# Of each tensor that an op makes: shape, strides, dtype and device.
_Like = list[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]


class _Unread(TorchDispatchMode):
    """Runs ops whose results are not read in backward, and gives no numbers for them in recomputation."""

    def __init__(self, likes: list[_Like], *, recomputing: bool) -> None:
        """likes: of the ops, written in forward, read in recomputation."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._likes, self._recomputing, self._next = likes, recomputing, 0

    def __enter__(self) -> _Unread:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]  # nor this
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_unread(func):
            return func(*args, **(kwargs or {}))
        if not self._recomputing:
            made = func(*args, **(kwargs or {}))
            leaves = pytree.tree_leaves(made)
            self._likes.append([(t.shape, t.stride(), t.dtype, t.device) for t in leaves if isinstance(t, Tensor)])
            return made
        like = self._likes[self._next]
        self._next += 1
        if not like:
            return func(*args, **(kwargs or {}))
        nothing = [_nothing(*one) for one in like]
        return nothing[0] if len(nothing) == 1 else tuple(nothing)


def _is_unread(func: Any) -> bool:
    how = _marked_as.get()
    if how == "product unread":
        return _is_contraction(func)
    # A draw moves the generator on for those after it.
    return how == "unread" and not func.is_view and torch.Tag.nondeterministic_seeded not in func.tags


def _nothing(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose elements are not a number, where they can be that. Strides decide which ops a view of it runs."""
    found = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    able = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    return found.fill_(float("nan")) if able else found.zero_()


def _contexts(kept: Callable[[], tuple[Any, Any]]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    likes: list[_Like] = []
    results: list[Results] = []

    def compute(work: Work) -> Results:
        token = _marked_as.set("recomputed")  # tensors inside are not saved beside the results
        try:
            found = work()
        finally:
            _marked_as.reset(token)
        results.append(tuple(result.detach() for result in found))
        return found

    def give(_: Work) -> Results:
        return results.pop(0)

    first, second = kept()
    # torch's mode counts calls, so it has to see each of them before ours.
    return (
        _all(keeping(compute), _Unread(likes, recomputing=False), first),
        _all(keeping(give), _Unread(likes, recomputing=True), second),
    )


@contextmanager
def _all(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _name(op: Any) -> str:
    """``mm`` of ``aten.mm.default``."""
    return getattr(getattr(op, "overloadpacket", None), "__name__", "")


def _is_contraction(op: Any) -> bool:
    return getattr(op, "namespace", "") == "aten" and _name(op) in _CONTRACTIONS


def _is_costly(op: Any) -> bool:
    """Whether a kernel is a product, an attention or a collective."""
    name = _name(op)
    costly = getattr(op, "namespace", "") in _KEPT_NAMESPACES or name in _CONTRACTIONS
    return costly or any(part in name for part in _ATTENTION)


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # A product that is not saved may have taken maxima over ranks, which are small.
    kept = _is_costly(op) and (_marked_as.get() is None or _name(op) == "all_reduce")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_listed(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    how = _marked_as.get() or traceback.current_meta.get("custom", {}).get(_NOTE)
    kept = (how == "saved" and not op.is_view) or (how == "products saved" and _is_costly(op))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


_POLICIES: dict[Remat, Callable[..., CheckpointPolicy]] = {"full": _keep_nothing, "listed": _keep_listed}
_LISTED: dict[Recomputation, _Mark] = {
    Recomputation.KEPT: "saved",
    Recomputation.PRODUCTS_KEPT: "products saved",
    Recomputation.UNREAD: "unread",
}
