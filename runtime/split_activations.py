"""What autograd saves of a block under a split backward (``split_backward``), and when it goes.

    I   every node of the line reads what was saved for it. What no branch reads as well goes with the node.
    W   the branches read the rest, and it goes with them.

Autograd alone would hold all of it until W. Of a block that is rematerialised nothing is saved in forward but what its
level says. The first node of I, or of W where a stage has no I, that reads something has the forward recomputed, once
for both passes; ``torch.utils.checkpoint`` recomputes it anew in each backward, of which every branch is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from autopar.runtime.host_activations import BlockOnHost, HostMemory, OnHost
from autopar.runtime.torch_private import node_of_backward

Contexts = Callable[[BlockOnHost | None], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class _Saved:
    """One tensor that autograd saves. call: that recomputes it, if any. value: None before that, and once it has
    gone."""

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: _Call | None, value: Tensor | None = None) -> None:
        self.call, self.value = call, value


@dataclass(slots=True)
class _InputPass:
    """The I that runs. on_line: whether a node is on its line. still_read: whether W, too, runs a node. read: what the
    node at hand has read."""

    on_line: Callable[[Node], bool]
    still_read: Callable[[Node], bool]
    node: Node | None = None
    read: list[_Saved] = field(default_factory=list)

    def note(self, saved: _Saved) -> None:
        node = node_of_backward()
        if node is not self.node:
            self.end_node()
            self.node = node
        if node is not None and not self.still_read(node):
            self.read.append(saved)

    def end_node(self) -> None:
        for saved in self.read:
            saved.value = None
        self.node, self.read = None, []


# The thread of autograd that belongs to a device reads it, so it is no context variable.
_running: list[_InputPass] = []


@contextmanager
def releasing(on_line: Callable[[Node], bool], still_read: Callable[[Node], bool]) -> Iterator[None]:
    """Within it, an I, what a node of autograd has read goes with the node, unless it is ``still_read``."""
    _running.append(_InputPass(on_line, still_read))
    try:
        yield
    finally:
        _running.pop().end_node()


def is_on_line(node: Node) -> bool | None:
    """Whether a node is on the line of the I that runs: W runs no node before it then. None if no I runs."""
    return _running[-1].on_line(node) if _running else None


def _unpack(saved: _Saved) -> Tensor:
    if saved.call is not None:
        saved.call.recompute()
    assert saved.value is not None, "the backward of a block reads what it read before"
    if _running:
        _running[-1].note(saved)
    return saved.value


def held(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which keeps what autograd saves."""

    def run(*args: Any) -> Any:
        with saved_tensors_hooks(lambda value: _Saved(None, value), _unpack):
            return call(*args)

    return run


@dataclass(frozen=True, slots=True)
class Waiting:
    """What of a function waits in host memory: what its calls mark, and its arguments number ``inputs``."""

    memory: HostMemory
    inputs: tuple[int, ...]


def recomputed(
    call: Callable[..., Any],
    *,
    preserve_rng_state: bool,
    contexts: Contexts | None = None,
    waiting: Waiting | None = None,
) -> Callable[..., Any]:
    """``call``, which is recomputed. contexts: of its forward, and of its recomputation. waiting: what of it waits in
    host memory in between."""

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args)
        host = None if waiting is None else BlockOnHost(waiting.memory)
        first, second = (nullcontext(), nullcontext()) if contexts is None else contexts(host)
        own = _Call(call, args, second, _RandomState(args) if preserve_rng_state else None, host)
        with saved_tensors_hooks(own.save, _unpack), first:
            made = call(*args)
        if waiting is not None:
            own.end_forward(waiting.inputs)
        return made

    return run


class _Enough(Exception):
    """Everything that was saved is there again."""


class _RandomState:
    """Of the CPU and of the devices of some tensors."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._cpu, (self._devices, self._of_devices) = torch.get_rng_state(), get_device_states(*args)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within it random numbers are those that came then."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._of_devices)
            yield


class _Input(NamedTuple):
    """An argument that waits in host memory."""

    value: OnHost
    requires_grad: bool

    def take(self) -> Tensor:
        return self.value.take().requires_grad_(self.requires_grad)


class _Call:
    """One forward of a block, to be recomputed."""

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        context: AbstractContextManager[Any],
        random: _RandomState | None,
        host: BlockOnHost | None = None,
    ) -> None:
        self._saved: list[weakref.ref[_Saved]] = []
        self._todo: tuple[Any, ...] | None = (call, args, context, random)
        self._host = host

    def end_forward(self, inputs: Sequence[int]) -> None:
        """The forward has ended, and arguments number ``inputs`` may go to host memory."""
        assert self._todo is not None and self._host is not None
        call, args, *rest = self._todo
        kept = list(args)
        for number in inputs:
            sent = self._host.put(args[number])
            kept[number] = _Input(sent, args[number].requires_grad) if isinstance(sent, OnHost) else args[number]
        self._todo = call, tuple(kept), *rest
        self._host.end_forward()

    def save(self, value: Tensor) -> _Saved:
        """A place for what autograd saves; not for the tensor itself."""
        saved = _Saved(self)
        self._saved.append(weakref.ref(saved))
        return saved

    def recompute(self) -> None:
        """Fill all places that are left, the first time."""
        if self._todo is None:
            return
        (call, args, context, random), self._todo = self._todo, None
        if self._host is not None:
            self._host.begin_backward()
            args = tuple(arg.take() if isinstance(arg, _Input) else arg for arg in args)
        filled = 0

        def fill(value: Tensor) -> None:
            nonlocal filled
            saved = self._saved[filled]()
            if saved is not None:
                saved.value = value.detach()
            filled += 1
            if filled == len(self._saved):
                raise _Enough

        with torch.enable_grad(), nullcontext() if random is None else random.restored():
            try:
                with saved_tensors_hooks(fill, _never), context:
                    call(*args)
            except _Enough:
                pass
        if filled != len(self._saved):
            raise RuntimeError(
                f"a recomputed forward saved {filled} tensors for backward, the first one {len(self._saved)}: it does "
                "not run the same ops each time"
            )


def _never(_: None) -> Tensor:
    raise AssertionError("nothing runs backward through a recomputed forward")
