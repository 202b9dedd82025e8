"""What marked calls of a block make: kept from its forward, and given in its recomputation without running.

    forward         s = linear(x, w)        y = all_reduce(s)     y is kept, s is not
    recomputation   s: not a number         y: the kept one       autograd sees both ops

The kernels of marked calls alone are watched from Python. ``create_selective_checkpoint_contexts`` watches all of them,
which takes longer than small kernels do (measured: 34 us a kernel, forward and recomputation).

What is not read is not a number in the first recomputation of a block at each size, so that a gradient which reads it
after all shows; later it is whatever memory holds, as writing it would take as long as a small op.
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
from autopar.ir.torch_private import TorchDispatchMode
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

    own = _Marked(target, mark)

    def call(*args: Any, **kwargs: Any) -> Any:
        run = _run.get()
        if run is None:
            return target(*args, **kwargs)
        if own.is_kernel and not run.recomputes:
            return run.made(own, target, target(*args, **kwargs))
        with _Watch(run, own):
            return target(*args, **kwargs)

    where = " on host" if mark.on_host else ""
    return named(call, target, f"{mark.kept} kept{where}, {mark.unread} unread")


class _Marked:
    """A call, and what becomes of its kernels. is_kernel: whether it is a kernel itself, as its first forward shows;
    what it makes in others is known without watching."""

    def __init__(self, target: Callable[..., Any], mark: Mark) -> None:
        self.mark, self._target = mark, target
        self._known: dict[Any, tuple[bool, bool]] = {}
        self._in_forward = set[Any]()
        self.is_kernel = False

    def becomes(self, kernel: Any) -> tuple[bool, bool]:
        """Whether a kernel's results are kept, and whether it does not run again. What autocast adds to a call that is
        a kernel runs both times."""
        if self.is_kernel and kernel is not self._target:
            return False, False
        found = self._known.get(kernel)
        if found is None:
            found = self._known[kernel] = self.mark.keeps(kernel), self.mark.skips(kernel)
        return found

    def ran(self, kernel: Any) -> None:
        """Note a kernel of a forward."""
        self._in_forward.add(kernel)
        self.is_kernel = self._in_forward == {self._target}


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

    @classmethod
    def of(cls, value: Tensor) -> _Like:
        return cls(value.shape, value.stride(), value.dtype, value.device)

    def nothing(self, *, fill: bool) -> Tensor:
        """Elements are not a number, where they can be that, or anything unless ``fill``. Strides decide which ops a
        view of it runs."""
        found = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if not fill:
            return found
        able = self.dtype.is_complex or (self.dtype.is_floating_point and self.dtype.itemsize > 1)
        return found.fill_(float("nan")) if able else found.zero_()


class Runs:
    """Of one block. written: tensors that nobody reads and that were not a number in a recomputation that ended."""

    def __init__(self) -> None:
        self.written = set[_Like]()

    def contexts(self, host: BlockOnHost | None = None) -> Any:
        """Of a forward and its recomputation. host: where what waits in host memory does."""
        run = Run(self, host)
        return run.forward(), run.recomputation()


class Run:
    """One forward of a block, and its recomputation. host: where what waits in host memory does."""

    def __init__(self, runs: Runs, host: BlockOnHost | None = None) -> None:
        self._runs, self._host, self._to_host = runs, host, list[int]()
        self._kept: list[Any] = []
        self._results: list[Results] = []
        self._next = 0
        self._written = set[_Like]()
        self.recomputes = self._in_work = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it marked calls, and what is ``computed_once``, leave what is kept."""
        with self._watching(), keeping(self._compute):
            yield
        # Only now is what collectives make there for certain.
        for number in self._to_host:
            assert self._host is not None
            self._kept[number] = _map(self._host.put, self._kept[number])

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Within it the same calls are given it."""
        self.recomputes, self._next = True, 0
        try:
            with self._watching(), keeping(lambda _: self._results.pop(0)):
                yield
        finally:
            self._runs.written |= self._written

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

    def call(self, own: _Marked, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a kernel of a marked call makes, or made in the forward."""
        if not self.recomputes:
            own.ran(kernel)
            return self.made(own, kernel, kernel(*args, **kwargs))
        keeps, skips = own.becomes(kernel)
        if self._in_work or not (keeps or skips):
            return kernel(*args, **kwargs)
        if self._next == len(self._kept) or self._kept[self._next] is None:
            raise RuntimeError(
                "the backward of a block that recomputes runs once, and its forward is the same each time"
            )
        given, self._kept[self._next] = self._kept[self._next], None
        self._next += 1
        if not keeps:
            return _map(self._nothing, given)
        return _map(OnHost.take, given) if own.mark.on_host else given

    def _nothing(self, like: _Like) -> Tensor:
        fill = like not in self._runs.written
        if fill:
            self._written.add(like)
        return like.nothing(fill=fill)

    def made(self, own: _Marked, kernel: Any, made: Any) -> Any:
        """What a kernel of a marked call made in a forward."""
        keeps, skips = own.becomes(kernel)
        if not self._in_work and (keeps or skips):
            if keeps and own.mark.on_host:
                self._to_host.append(len(self._kept))
            # Autograd writes to the tensors that are made themselves.
            self._kept.append(_map(Tensor.detach if keeps else _Like.of, made))
        return made


def _map(change: Callable[[Any], Any], made: Any) -> Any:
    """What a kernel made, with its tensors changed, or what stands for them."""
    if isinstance(made, Tensor | _Like | OnHost):
        return change(made)
    if isinstance(made, list | tuple):
        return type(made)(_map(change, one) for one in made)
    return made


_run: ContextVar[Run | None] = ContextVar("autopar run of a block that recomputes", default=None)


class _Watch(TorchDispatchMode):
    def __init__(self, run: Run, own: _Marked) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._run, self._own = run, own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run.call(self._own, func, args, kwargs or {})
