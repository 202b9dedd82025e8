"""Rematerialisation: the tensors that a block's function saves for backward, and the ops that are recomputed.

    none        saves everything that autograd saves
    selective   saves results of contractions, of reductions and all-to-alls between ranks, and the block's inputs; all
                other ops are recomputed, gathers from other ranks too
    alternate   the same without every second matrix product, which is recomputed
    full        saves the block's inputs

A loss in chunks (``ir/lowered/chunked_loss.py``) makes its gradients forward; they are saved at every level.

Where only a reduction or an all-to-all reads the result of a matrix product, the result of the collective is saved
instead. In recomputation nobody reads the product, so it does not run:

    forward         s = linear(x, w)          y = all_reduce(s)     y is saved, s is not
    recomputation   s: memory of its shape    y: the saved one      autograd sees both ops
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.ir.analysis.matrix_products import every_second, is_product
from autopar.ir.lowered.reductions import split_bias
from autopar.ir.ops.narrow_collectives import narrow_all_gather, narrowing_reduce_scatter
from autopar.ir.primitives.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autopar.ir.primitives.computed_once import Results, Work, keeping
from autopar.ir.program import Remat
from autopar.ir.torch_private import TorchDispatchMode
from autopar.runtime.split_activations import Contexts, held, recomputed

# What selective rematerialisation keeps: results that are dear to compute or to communicate.
_CONTRACTIONS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2")
_ATTENTION = ("_scaled_dot_product", "flash_attention")
_KEPT_NAMESPACES = ("_c10d_functional", "autopar")

# Within a call whose results are not saved: whether they are unread, or recomputed.
_Mark = Literal["unread", "recomputed"]
_not_kept: ContextVar[_Mark | None] = ContextVar("autopar results that are not saved", default=None)


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
    in two parts; it is not compiled then.
    """
    if remat == "none":
        return held(call) if splits_backward else call
    contexts: Contexts | None = None
    if remat != "full" or (keeps_work and not compiled):
        # The compiler knows torch's contexts alone; it finds out itself what nobody reads.
        kept = partial(create_selective_checkpoint_contexts, _keep if remat != "full" else _keep_nothing)
        contexts = kept if compiled else partial(_contexts, kept)
    if splits_backward:
        return recomputed(call, preserve_rng_state=preserve_rng_state, contexts=contexts)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if contexts is not None:
        options["context_fn"] = contexts

    def run(*args: Tensor) -> Any:
        return checkpoint(call, *args, **options) if torch.is_grad_enabled() else call(*args)

    return run


def mark(graph: fx.Graph, remat: Remat) -> None:
    """Wrap, in place, the costly calls in ``graph`` whose results ``remat`` does not save."""
    sums = {all_reduce, reduce_scatter, narrowing_reduce_scatter, all_to_all}
    products = [node for node in graph.nodes if is_product(node.args[0] if node.target is split_bias else node.target)]
    unread = {node for node in products if node.users and all(user.target in sums for user in node.users)}
    recomputed = set(every_second(products)) if remat == "alternate" else set()
    for node in graph.nodes:
        if node.target in (all_gather, narrow_all_gather) or node in unread:
            node.target = _marked(node.target, "unread")
        elif node in recomputed:
            node.target = _marked(node.target, "recomputed")


@cache
def _marked(target: Callable[..., Any], how: _Mark) -> Callable[..., Any]:
    """``target``, with its results not saved."""

    def call(*args: Any, **kwargs: Any) -> Any:
        token = _not_kept.set(how)
        try:
            return target(*args, **kwargs)
        finally:
            _not_kept.reset(token)

    call.__name__ = call.__qualname__ = f"{how}_{getattr(target, '__name__', 'op').replace('.', '_')}"
    call.__module__ = __name__
    return call


# Shape, strides and dtype of a tensor.
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _Unread(TorchDispatchMode):
    """Runs products whose results are not saved, and gives memory of their shape in recomputation."""

    def __init__(self, layouts: list[_Layout], *, recomputing: bool) -> None:
        """layouts: of the results, written in forward, read in recomputation."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._layouts, self._recomputing, self._next = layouts, recomputing, 0

    def __enter__(self) -> _Unread:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]  # nor this
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (_not_kept.get() == "unread" and _is_contraction(func)):
            return func(*args, **(kwargs or {}))
        if not self._recomputing:
            result: Tensor = func(*args, **(kwargs or {}))
            self._layouts.append((result.shape, result.stride(), result.dtype))
            return result
        shape, stride, dtype = self._layouts[self._next]
        self._next += 1
        device = next(a.device for a in args if isinstance(a, Tensor))
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _contexts(kept: Callable[[], tuple[Any, Any]]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    layouts: list[_Layout] = []
    results: list[Results] = []

    def compute(work: Work) -> Results:
        token = _not_kept.set("recomputed")  # tensors inside are not saved beside the results
        try:
            found = work()
        finally:
            _not_kept.reset(token)
        results.append(tuple(result.detach() for result in found))
        return found

    def give(_: Work) -> Results:
        return results.pop(0)

    first, second = kept()
    # torch's mode counts calls, so it has to see each of them before ours.
    return (
        _all(keeping(compute), _Unread(layouts, recomputing=False), first),
        _all(keeping(give), _Unread(layouts, recomputing=True), second),
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


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = _name(op)
    dear = getattr(op, "namespace", "") in _KEPT_NAMESPACES or name in _CONTRACTIONS
    dear = dear or any(part in name for part in _ATTENTION)
    # A product that is not saved may have taken maxima over ranks, which are small.
    kept = dear and (_not_kept.get() is None or name == "all_reduce")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
