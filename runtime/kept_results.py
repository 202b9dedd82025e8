"""What marked calls of a block make: kept from its forward, and given in its recomputation without running.

    forward         s = linear(x, w)        y = all_reduce(s)     y is kept, s is not
    recomputation   s: not a number         y: the kept one       autograd sees both ops

The kernels of marked calls alone are watched from Python. ``create_selective_checkpoint_contexts`` watches all of them,
which takes longer than small kernels do (measured: 34 us a kernel, forward and recomputation).

What is not read is not a number in recomputation, so that a gradient which reads it after all shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from autopar.ir.primitives.computed_once import Results, Work, keeping
from autopar.ir.torch_private import TorchDispatchMode, pytree
from autopar.runtime.host_activations import BlockOnHost, OnHost

# Kernels whose results are dear to compute or to communicate.
_CONTRACTIONS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2")
_ATTENTION = ("_scaled_dot_product", "flash_attention")
_OF_COLLECTIVES = ("_c10d_functional", "autopar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What becomes of what the kernels of a call make; the others run again.

    kept: by all of them; by products, attentions and collectives, which are costly; by reductions between ranks, as a
    product that runs again may have taken maxima over them, which are small. unread: that nothing in backward reads.
    on_host: what is kept waits in host memory.
    """

    kept: Literal["all", "costly", "reductions", "none"] = "none"
    unread: Literal["all", "products", "none"] = "none"
    on_host: bool = False

    def keeps(self, kernel: Any) -> bool:
        """Whether a kernel's results are kept."""
        if self.kept == "all":
            return not kernel.is_view
        return self.kept != "none" and is_costly(kernel) and (self.kept == "costly" or _name(kernel) == "all_reduce")

    def skips(self, kernel: Any) -> bool:
        """Whether a kernel does not run in the recomputation, since nothing reads its results."""
        if self.unread == "products":
            return getattr(kernel, "namespace", "") == "aten" and _name(kernel) in _CONTRACTIONS
        # A draw moves the generator on for those after it.
        drawn = torch.Tag.nondeterministic_seeded in kernel.tags
        return self.unread == "all" and not kernel.is_view and not drawn


def is_costly(kernel: Any) -> bool:
    """Whether a kernel is a product, an attention or a collective."""
    name = _name(kernel)
    return communicates(kernel) or name in _CONTRACTIONS or any(part in name for part in _ATTENTION)


def communicates(kernel: Any) -> bool:
    """Whether a kernel is a collective."""
    return getattr(kernel, "namespace", "") in _OF_COLLECTIVES


def _name(kernel: Any) -> str:
    """``mm`` of ``aten.mm.default``."""
    return getattr(getattr(kernel, "overloadpacket", None), "__name__", "")


@cache
def marked(target: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    """``target``, whose kernels the ``Run`` at hand watches."""

    def call(*args: Any, **kwargs: Any) -> Any:
        run = _run.get()
        if run is None:
            return target(*args, **kwargs)
        with _Watch(run, mark):
            return target(*args, **kwargs)

    where = " on host" if mark.on_host else ""
    return named(call, target, f"{mark.kept} kept{where}, {mark.unread} unread")


def named(call: Callable[..., Any], target: Callable[..., Any], how: str) -> Callable[..., Any]:
    """``call``, with a name in generated code that says what it calls; ``inspect.unwrap`` gives ``target``."""
    words = how.replace(",", "").split()
    call.__wrapped__ = target  # type: ignore[attr-defined]  # as functools.wraps does
    call.__name__ = call.__qualname__ = "_".join([*words, getattr(target, "__name__", "op").replace(".", "_")])
    call.__module__ = __name__
    return call


class _Like(NamedTuple):
    """A tensor that nobody reads."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def nothing(self) -> Tensor:
        """Elements are not a number, where they can be that. Strides decide which ops a view of it runs."""
        found = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        able = self.dtype.is_complex or (self.dtype.is_floating_point and self.dtype.itemsize > 1)
        return found.fill_(float("nan")) if able else found.zero_()


class Run:
    """One forward of a block, and its recomputation. host: where what waits in host memory does."""

    def __init__(self, host: BlockOnHost | None = None) -> None:
        self._host, self._to_host = host, list[int]()
        self._kept: list[Any] = []
        self._results: list[Results] = []
        self._next = 0
        self._recomputes = self._in_work = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it marked calls, and what is ``computed_once``, leave what is kept."""
        with self._watching(), keeping(self._compute):
            yield
        # Only now is what collectives make there for certain.
        for number in self._to_host:
            assert self._host is not None
            self._kept[number] = pytree.tree_map_only(Tensor, self._host.put, self._kept[number])

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Within it the same calls are given it."""
        self._recomputes, self._next = True, 0
        with self._watching(), keeping(lambda _: self._results.pop(0)):
            yield

    @contextmanager
    def _watching(self) -> Iterator[None]:
        token = _run.set(self)
        try:
            yield
        finally:
            _run.reset(token)

    def _compute(self, work: Work) -> Results:
        self._in_work = True  # tensors inside are not kept beside the results
        try:
            found = work()
        finally:
            self._in_work = False
        self._results.append(tuple(result.detach() for result in found))
        return found

    def call(self, mark: Mark, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a kernel of a marked call makes, or made in the forward."""
        keeps = not self._in_work and mark.keeps(kernel)
        if not keeps and (self._in_work or not mark.skips(kernel)):
            return kernel(*args, **kwargs)
        if not self._recomputes:
            made = kernel(*args, **kwargs)
            # Autograd writes to the tensors that are made themselves.
            if keeps and mark.on_host:
                self._to_host.append(len(self._kept))
            self._kept.append(pytree.tree_map_only(Tensor, Tensor.detach if keeps else _like, made))
            return made
        if self._next == len(self._kept) or self._kept[self._next] is None:
            raise RuntimeError(
                "the backward of a block that recomputes runs once, and its forward is the same each time"
            )
        given, self._kept[self._next] = self._kept[self._next], None
        self._next += 1
        if keeps:
            return pytree.tree_map_only(OnHost, OnHost.take, given) if mark.on_host else given
        return pytree.tree_map_only(_Like, _Like.nothing, given, is_leaf=_is_like)


_run: ContextVar[Run | None] = ContextVar("autopar run of a block that recomputes", default=None)


def _like(value: Tensor) -> _Like:
    return _Like(value.shape, value.stride(), value.dtype, value.device)


def _is_like(value: Any) -> bool:
    return isinstance(value, _Like)


class _Watch(TorchDispatchMode):
    def __init__(self, run: Run, mark: Mark) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._run, self._mark = run, mark

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run.call(self._mark, func, args, kwargs or {})
