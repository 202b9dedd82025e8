"""A block that is recomputed: of what autograd saves nothing is kept. The first node of a backward that reads something
has the forward run once more, up to the last tensor that is saved, which goes with the node that reads it.

``torch.utils.checkpoint`` does so in each backward anew, and a split backward has one for every branch. It holds the
inputs of a block where they are, and takes 0.5 ms a block longer (ten saved tensors, thirty kernels, one core).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from autopar.runtime.host_activations import BlockOnHost, HostMemory, OnHost
from autopar.runtime.split_activations import Saved, read

Contexts = Callable[[BlockOnHost | None], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


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
        with saved_tensors_hooks(own.save, read), first:
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


class _Autocast(NamedTuple):
    """What ``torch.autocast`` says of a type of device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device_type: str) -> _Autocast:
        return cls(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> list[_Autocast]:
        """Of the CPU and of the devices of some tensors."""
        types = {"cpu", *(arg.device.type for arg in args if isinstance(arg, Tensor))}
        return [cls.now(device_type) for device_type in types if torch.amp.is_autocast_available(device_type)]

    def restored(self) -> AbstractContextManager[Any]:
        """Within it autocast does what it did then."""
        same = self == _Autocast.now(self.device_type)
        return nullcontext() if same else torch.autocast(self.device_type, self.dtype, self.enabled)


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
        self._saved: list[tuple[weakref.ref[Saved], torch.Size]] = []
        self._todo: tuple[Any, ...] | None = (call, args, context, random, _Autocast.of(args))
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

    def save(self, value: Tensor) -> Saved:
        """A place for what autograd saves; not for the tensor itself."""
        saved = Saved(self.recompute)
        self._saved.append((weakref.ref(saved), value.shape))
        return saved

    def recompute(self) -> None:
        """Fill all places that are left, the first time."""
        if self._todo is None:
            return
        (call, args, context, random, autocasts), self._todo = self._todo, None
        if self._host is not None:
            self._host.begin_backward()
            args = tuple(arg.take() if isinstance(arg, _Input) else arg for arg in args)
        filled = 0

        def fill(value: Tensor) -> None:
            nonlocal filled
            place, shape = self._saved[filled]
            if value.shape != shape:
                raise RuntimeError(
                    f"a recomputed forward saved a tensor of shape {tuple(value.shape)} for backward where the first "
                    f"one saved {tuple(shape)}: it does not run the same ops each time"
                )
            saved = place()
            if saved is not None:
                saved.value = value.detach()
            filled += 1
            if filled == len(self._saved):
                raise _Enough

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if random is not None:
                stack.enter_context(random.restored())
            for autocast in autocasts:
                stack.enter_context(autocast.restored())
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
