"""A tensor of which a rank has the 8-bit floats alone, as products by tensor read it.

    weight, a piece on each rank     ── quantised by the maximum of all pieces, gathered ──>     NarrowTensor

It has the shape, the dtype and the gradient of what it stands for, so that a graph is the same with it. What is
quantised by one scale for the whole tensor is the same number wherever it is quantised, so that a product of it is, bit
by bit, that of the tensor itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.torch_private import UNSAFE_VIEW, no_torch_function, wrapper

_aten = torch.ops.aten
# Ops that move no number; each is the same on the narrow floats.
_VIEWS = frozenset(
    (
        *(_aten.alias.default, _aten.detach.default, _aten.view.default, _aten.as_strided.default),
        *(_aten.t.default, _aten.transpose.int, UNSAFE_VIEW),
    )
)


class NarrowTensor(Tensor):
    """Stands for a tensor of ``dtype``.

    floats: in 8 bits, of its shape and strides. largest: (), float32: the magnitude that their scale was
    computed of (``quantise.quantised``).
    """

    floats: Tensor
    largest: Tensor

    @staticmethod
    def __new__(cls, floats: Tensor, largest: Tensor, dtype: torch.dtype) -> NarrowTensor:
        made: NarrowTensor = wrapper(cls, floats, dtype, floats.device)
        made.floats, made.largest = floats, largest
        return made

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # ops arrive one level below

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _VIEWS:
            raise NotImplementedError(
                f"{func}: of this tensor, {tuple(args[0].shape)}, ranks have gathered the 8-bit floats that a product "
                "by tensor reads, and this op needs others.\n  try: its layer without a recipe in the plan"
            )
        own = args[0]
        return NarrowTensor(func(own.floats, *args[1:], **(kwargs or {})), own.largest, own.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """For ``torch.compile``: the tensors that it is made of."""
        return ["floats", "largest"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> NarrowTensor:
        """For ``torch.compile``: it is made of its tensors again."""
        return NarrowTensor(inner["floats"], inner["largest"], dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NarrowTensor(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.floats.dtype})"
