"""A model captured once, with symbols, as it is at any batch and length.

captured at (512, 8192), with symbols                    ->  the same program?  ->  at(512, 2048), at(512, 4096) ...
captured at (256, 2048), by a fork if there is a core   ->                     ->  what the fork then does with that
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from autopar.helper import Helper, spare_cores
from autopar.ir.capture.capture import capture
from autopar.ir.capture.other_sizes import captured_at, described_program
from autopar.ir.capture.symbols import named_dims
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel
from autopar.ir.torch_private import pytree
from autopar.passes.normalise import normalise

# The inputs of a model for a global batch and a length; None for the model's own.
InputsOf = Callable[[int | None, int | None], Any]

# A global batch and a length.
Size = tuple[int | None, int | None]


class SizedCaptures:
    """The model at any size: from the capture with symbols if that is shown to hold, else captured anew.

    seconds: spent on captures. count: how often the model was traced. fixed: names of sizes that are no symbols -> why,
    with the line of the model that makes a number of each.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs_of: InputsOf,
        size: Size,
        *,
        other: Size | None = None,
        then: Callable[[SizedCaptures], Any] = lambda captures: None,
        name: str | None = None,
    ) -> None:
        """size: of the first capture. other: a size at which it has to hold; None if no other is asked for, and there
        are no symbols. then: what a fork does that has captured ``other``. Raises CaptureError."""
        self._model, self._inputs_of, self._name = model, inputs_of, name
        self.seconds, self.count = 0.0, 0
        self._tensors = _tensors(inputs_of(*size))
        self._known: dict[Size, CapturedModel] = {}
        self._symbolic: CapturedModel | None = None
        self._fork: Helper | None = None
        if other is None:
            first = self._known[size] = self._capture(*size)
        else:
            if spare_cores():
                steps = (lambda: self._described(other), lambda: then(self))
                self._fork = Helper(lambda step: steps[step]())
                self._fork.send(0)
                self._fork.send(1)
            try:
                first = self._symbolic = self._capture(*size, symbolic=True)
                if not self._is_at(other):
                    self._symbolic = None
            except BaseException:
                self.stop()
                raise
        self.fixed: Mapping[str, str] = first.fixed

    def at(self, batch: int | None, length: int | None) -> CapturedModel:
        """The capture of one size, in normal form. Raises CaptureError."""
        if (batch, length) not in self._known:
            start = time.perf_counter()
            found = self._at(batch, length)
            self.seconds += time.perf_counter() - start
            self._known[batch, length] = self._capture(batch, length) if found is None else found
        return self._known[batch, length]

    def symbolic_at(self, batch: int | None, length: int | None) -> CapturedModel:
        """The capture with symbols, of this size where none holds for all. Raises CaptureError."""
        return self._symbolic or self._capture(batch, length, symbolic=True)

    def done_by_fork(self) -> Any:
        """What the fork has made of its capture; None where there is no fork, or it has ended."""
        found = self._received()
        self.stop()
        return found

    def stop(self) -> None:
        """End the fork, if there is one."""
        if self._fork is not None:
            self._fork.stop()
        self._fork = None

    def _received(self) -> Any:
        if self._fork is not None:
            with suppress(EOFError, OSError):
                return self._fork.receive()
        return None

    def _is_at(self, size: Size) -> bool:
        """Whether the capture with symbols is at ``size`` what a capture of that size is, which the fork may have."""
        answer = self._received()
        # Without an answer here, where an error is raised.
        expected, seconds = answer or self._described(size)
        if answer is not None:
            self.seconds, self.count = self.seconds + seconds, self.count + 1
        found = self._at(*size)
        return found is not None and _digest(found) == expected

    def _described(self, size: Size) -> tuple[str, float]:
        """A digest of the program of a capture at ``size``, and the seconds that it took."""
        before = self.seconds
        found = self._known[size] = self._capture(*size)
        return _digest(found), self.seconds - before

    def _at(self, batch: int | None, length: int | None) -> CapturedModel | None:
        """From the capture with symbols; None if that holds for other sizes alone."""
        if self._symbolic is None:
            return None
        given, sizes = _tensors(self._inputs_of(batch, length)), dict[str, int]()
        for tensor, whole, names in zip(given, self._tensors, named_dims(self._tensors), strict=True):
            for dim, size in enumerate(tensor.shape):
                if dim not in names and size != whole.shape[dim]:
                    return None
                if dim in names and sizes.setdefault(names[dim], size) != size:
                    return None
        try:
            return captured_at(self._symbolic, sizes)
        except CaptureError:
            return None

    def _capture(self, batch: int | None, length: int | None, *, symbolic: bool = False) -> CapturedModel:
        start = time.perf_counter()
        captured = capture(self._model, self._inputs_of(batch, length), name=self._name, symbolic=symbolic)
        found = normalise(captured, check=not symbolic)
        self.seconds, self.count = self.seconds + time.perf_counter() - start, self.count + 1
        return found


def _digest(captured: CapturedModel) -> str:
    """Of all that its ops do. It is short: a fork that sends more waits until that is read."""
    return hashlib.sha256(repr(described_program(captured)).encode()).hexdigest()


def _tensors(inputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
