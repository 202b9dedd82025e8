"""Activations that wait in host memory between the forward of a block and its backward.

    compute       F0   F1   F2   ...   B2   B1   B0
    to the host        0    1                         2 has not left when its backward comes
    back                               1    0

What a block keeps is sent when its forward ends, beside the forward of the next block, which then waits for the copy:
from there on it takes no memory of the device. Before the recomputation of a block it comes back; that of the block
whose backward is next is fetched ahead. So two blocks have something on the device at a time.

On a GPU the copies run on two streams of their own, from and to pinned buffers, which are used again from step to step.
Elsewhere each is made at once, to other memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# What a buffer may have, of the bytes that are asked for: lengths of batches differ from step to step. Chosen.
_WASTE = 1.25


class _Copies:
    """Copies that are made at once."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, source: Tensor, buffer: Tensor) -> Any:
        """Begin a copy to host memory. Returns what ``wait`` and ``fetch`` take."""
        buffer.copy_(source)

    def fetch(self, buffer: Tensor, target: Tensor, sent: Any) -> Any:
        """Begin a copy back, of what was ``sent``."""
        target.copy_(buffer)

    def wait(self, copy: Any) -> None:
        """What is computed from now on comes after a copy."""


class _StreamCopies(_Copies):
    """Copies of a GPU, beside what it computes. Their tensors have to be there until compute has waited for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sends, self._fetches = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: Tensor, buffer: Tensor) -> Any:
        return self._copy(self._sends, source, buffer)

    def fetch(self, buffer: Tensor, target: Tensor, sent: Any) -> Any:
        self._fetches.wait_event(sent)
        return self._copy(self._fetches, buffer, target)

    def wait(self, copy: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(copy)

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> Any:
        # What is computed so far makes the source, or may use the memory of the target.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


class OnHost:
    """A tensor that waits in host memory. num_readers: how often it will be taken."""

    __slots__ = ("__weakref__", "_back", "_buffer", "_here", "_layout", "_memory", "_sent", "num_readers")

    def __init__(self, memory: HostMemory, value: Tensor) -> None:
        self.num_readers = 0
        self._memory = memory
        self._layout = value.shape, value.stride(), value.dtype, value.device
        self._here: Tensor | None = value
        source = _bytes_of(value)
        self._buffer = memory.take_buffer(source.numel())
        self._sent = memory.copies.send(source, self._buffer[: source.numel()])
        self._back: tuple[Any] | None = None

    def release(self) -> None:
        """Take no memory of the device from here on, if it is still the tensor that was sent."""
        if self._here is not None and self._back is None:
            self._memory.copies.wait(self._sent)
            self._here = None

    def fetch(self) -> None:
        """Begin to bring it back, unless it is there."""
        if self._here is None:
            size, strides, dtype, device = self._layout
            self._here = torch.empty_strided(size, strides, dtype=dtype, device=device)
            target = _bytes_of(self._here)
            self._back = (self._memory.copies.fetch(self._buffer[: target.numel()], target, self._sent),)

    def take(self) -> Tensor:
        """The tensor on the device, where its last reader alone still holds it."""
        self.fetch()
        assert self._here is not None
        if self._back is not None:
            self._memory.copies.wait(*self._back)
        found, self.num_readers = self._here.detach(), self.num_readers - 1
        if not self.num_readers:
            self._here = None
        return found

    def __del__(self) -> None:
        if self._here is not None and self._back is not None:
            self._memory.copies.wait(*self._back)
        self._memory.give_back(self._buffer)


class BlockOnHost:
    """What one forward of a block has in host memory."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self._tensors = memory, list[OnHost]()
        self._next: BlockOnHost | None = None

    def put(self, value: Tensor) -> OnHost | Tensor:
        """Send a tensor. Returns the tensor itself if it has no memory of its own that could be sent."""
        found = self._memory.put(value.detach())
        if isinstance(found, OnHost):
            self._tensors.append(found)
            found.num_readers += 1
        return found

    def end_forward(self) -> None:
        """The block has put there all that waits."""
        self._next = self._memory.follow(self)

    def fetch(self) -> None:
        """Begin to bring everything back."""
        for tensor in self._tensors:
            tensor.fetch()

    def release(self) -> None:
        """Take no memory of the device from here on."""
        for tensor in self._tensors:
            tensor.release()

    def begin_backward(self) -> None:
        """What the block has there is taken next; what the next backward takes comes meanwhile."""
        self._memory.release(unless=self)
        self.fetch()
        self._tensors.clear()
        following, self._next = self._next or self._memory.next_pass, None
        if following is not None:
            following.fetch()


class HostMemory:
    """The host memory of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.copies = _StreamCopies(device) if device.type == "cuda" else _Copies()
        self.num_bytes = 0
        """Of all buffers."""
        self.latest: BlockOnHost | None = None
        """The last block so far in the forward of a microbatch in a stage."""
        self.next_pass: BlockOnHost | None = None
        """What the backward pass after the one at hand takes first."""
        self._sending: BlockOnHost | None = None
        self._free: dict[int, list[Tensor]] = {}
        self._put: dict[Hashable, weakref.ref[OnHost]] = {}

    def begin_forward(self) -> None:
        """The forward of a microbatch in a stage begins."""
        self.latest = None
        self._put.clear()

    def put(self, value: Tensor) -> OnHost | Tensor:
        """See ``BlockOnHost.put``. What two blocks of a microbatch put there is sent once."""
        if not value.numel() or value.layout != torch.strided or value.is_conj() or value.is_neg():
            return value
        layout = value.storage_offset(), value.shape, value.stride(), value.dtype
        key = (StorageWeakRef(value.untyped_storage()), *layout)
        known = self._put.get(key)
        found = None if known is None else known()
        if found is None:
            found = OnHost(self, value)
            self._put[key] = weakref.ref(found)
        return found

    def follow(self, block: BlockOnHost) -> BlockOnHost | None:
        """The forward of a block has ended. Returns the one before it."""
        self.release()
        self._sending, before, self.latest = block, self.latest, block
        return before

    def end_forward(self, results: Sequence[Tensor]) -> None:
        """The forward of a microbatch in a stage has ended. Its last block is fetched when the backward begins."""
        latest = self.latest
        if latest is not None:
            for value in [own for own in results if own.requires_grad][:1]:
                value.register_hook(lambda _: latest.fetch())

    def release(self, unless: BlockOnHost | None = None) -> None:
        """The block that was sent last takes no memory of the device from here on. unless: its backward begins."""
        sending, self._sending = self._sending, None
        if sending is not None and sending is not unless:
            sending.release()

    def take_buffer(self, num_bytes: int) -> Tensor:
        """A buffer of a number of bytes, or of a few more."""
        fitting = (size for size, free in self._free.items() if free and num_bytes <= size <= _WASTE * num_bytes)
        size = min(fitting, default=None)
        if size is not None:
            return self._free[size].pop()
        self.num_bytes += num_bytes
        return self.copies.buffer(num_bytes)

    def give_back(self, buffer: Tensor) -> None:
        """A buffer that is free."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


def _bytes_of(value: Tensor) -> Tensor:
    """The memory that the elements of a tensor lie in, from the first to the last, as bytes."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((extent,), (1,)).view(torch.uint8)
