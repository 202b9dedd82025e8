"""Precisions of compute. Parameters, their gradients' sums and optimiser state are float32 under all of them."""

from __future__ import annotations

import torch

from autopar.ir.plan import Precision

_NARROW: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def narrow_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype that float32 parameters and activations are computed in; None for that of the model."""
    return _NARROW.get(precision)


def compute_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """What an element is computed in that the capture has as ``dtype``: float32 becomes the precision of compute."""
    return _NARROW.get(precision, dtype) if dtype == torch.float32 else dtype


def itemsize_of(dtype: torch.dtype, precision: str) -> int:
    """Bytes of an element that the capture has as ``dtype``, in compute."""
    return compute_dtype(dtype, precision).itemsize
