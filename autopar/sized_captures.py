"""A model captured once, with symbols, as it is at any batch and length.

captured at (512, 8192), with symbols  ->  compared with a capture at (256, 2048)  ->  at(512, 2048), at(512, 4096) ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.ir.capture.capture import capture
from autopar.ir.capture.other_sizes import captured_at, same_program
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
    """The model at any size: from the capture with symbols while that is shown to hold, else captured anew.

    seconds: spent on captures. count: how often the model was traced. fixed: names of sizes that are no symbols -> why,
    with the line of the model that makes a number of each.
    """

    def __init__(
        self, model: nn.Module, inputs_of: InputsOf, size: Size, *, symbolic: bool, name: str | None = None
    ) -> None:
        """size: of the first capture. symbolic: with symbols, for other sizes. Raises CaptureError."""
        self._model, self._inputs_of, self._name = model, inputs_of, name
        self.seconds, self.count = 0.0, 0
        self._tensors = _tensors(inputs_of(*size))
        first = self._capture(*size, symbolic=symbolic)
        self.fixed: Mapping[str, str] = first.fixed
        self._symbolic = first if symbolic else None
        self._known: dict[Size, CapturedModel] = {} if symbolic else {size: first}

    def hold_at(self, size: Size) -> bool:
        """Whether the capture with symbols is at ``size`` what a capture of that size is; forgets it if not."""
        self._known[size] = self._capture(*size)
        found = self._at(*size)
        if found is None or not same_program(found, self._known[size]):
            self.forget_symbols()
        return self._symbolic is not None

    def forget_symbols(self) -> None:
        """From now on capture at each size anew: the capture with symbols does not hold. Some that are known may be of
        it."""
        self._symbolic = None
        self._known = {}

    def at(self, batch: int | None, length: int | None) -> CapturedModel:
        """The capture of one size, in normal form. Raises CaptureError."""
        if (batch, length) not in self._known:
            start = time.perf_counter()
            found = self._at(batch, length)
            self.seconds += time.perf_counter() - start
            self._known[batch, length] = self._capture(batch, length) if found is None else found
        return self._known[batch, length]

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


def _tensors(inputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
