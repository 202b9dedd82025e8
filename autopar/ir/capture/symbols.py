"""The batch and the lengths of sequences as symbols of one capture.

    tokens (8, 16), labels (8, 16), images (8, 3, 32, 32)   ->   (batch, length), (batch, length), (batch, 3, 32, 32)

Dimension 0 of what has the size of the batch is the batch. The other dimensions of integers and truth values are
lengths; what is equally long has one symbol. Dimension 1 of a real tensor that is as long as one of those may be that
length, if the model makes it so (embeddings beside a mask), or a number (channels). Sizes of 1 stay numbers, as
torch.export broadcasts them, and so does what the model itself fixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor
from torch.export import Dim

from autopar.ir.sizes import expressed
from autopar.ir.torch_private_symbols import are_equal, expression_of_symbol, hint_of

BATCH = "batch"
LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SymbolicDims:
    """Of each tensor of a call dimension -> name of its symbol; None where the model may fix the size."""

    names: tuple[Mapping[int, str | None], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> SymbolicDims:
        """The dimensions that a batch and lengths may have; none if there is no batch."""
        batch = tensors[0].shape[0] if tensors[0].dim() else 0
        lengths: dict[int, str] = {}
        for tensor in tensors:
            for size in tensor.shape[1:] if not tensor.is_floating_point() else ():
                if size > 1:
                    lengths.setdefault(size, LENGTH if not lengths else f"{LENGTH}_{len(lengths) + 1}")
        names: list[dict[int, str | None]] = []
        for tensor in tensors:
            found: dict[int, str | None] = {}
            for dim, size in enumerate(tensor.shape):
                if dim == 0 and size == batch > 1:
                    found[dim] = BATCH
                elif dim and size in lengths and not tensor.is_floating_point():
                    found[dim] = lengths[size]
                elif dim == 1 and size in lengths:
                    found[dim] = None
            names.append(found)
        return cls(tuple(names))

    @property
    def dynamic_shapes(self) -> Any:
        """What torch.export takes of a model from a flat list of tensors; each symbol may turn out to be a number."""
        return (tuple(dict.fromkeys(dims, Dim.AUTO) for dims in self.names),)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Within a trace: dimensions with one name are equal."""
        first: dict[str, Any] = {}
        for tensor, dims in zip(tensors, self.names, strict=True):
            for dim, name in dims.items():
                size = tensor.shape[dim]
                if name is not None:
                    are_equal(first.setdefault(name, size), size)

    def found(self, tensors: Sequence[Tensor]) -> dict[str, sympy.Symbol]:
        """Symbols by name, after a trace. tensors: the traced inputs. What became a number is left out."""
        symbols: dict[str, sympy.Symbol] = {}
        dims = [
            (own, tensor.shape[dim])
            for tensor, names in zip(tensors, self.names, strict=True)
            for dim, own in names.items()
        ]
        for name, size in sorted(dims, key=lambda pair: pair[0] is None):
            expression = expression_of_symbol(size)
            if isinstance(expression, sympy.Symbol) and expression not in symbols.values():
                symbols[name or f"{LENGTH}_{len(symbols) + 1}"] = expression
        return symbols


def fixed_dims(dims: SymbolicDims, tensors: Sequence[Tensor], lines: Mapping[int, str]) -> dict[str, str]:
    """Names of what became a number in a trace -> where it did. lines: by the number."""
    found: dict[str, str] = {}
    for tensor, names in zip(tensors, dims.names, strict=True):
        for dim, name in names.items():
            size = expression_of_symbol(tensor.shape[dim])
            if name is not None and size.is_Integer and int(size) in lines:
                found[name] = f"a number is made of it at {lines[int(size)]}"
    return found


def named_dims(tensors: Sequence[Tensor]) -> list[dict[int, str]]:
    """Of each input of a call dimension -> name of what may be of another size in another call.

    A real tensor's dimension 1 that is as long as a length is that length.
    """
    dims = SymbolicDims.of(tensors).names
    lengths = {
        tensor.shape[dim]: name
        for tensor, own in zip(tensors, dims, strict=True)
        for dim, name in own.items()
        if name is not None and dim
    }
    return [
        {dim: lengths[tensor.shape[dim]] if name is None else name for dim, name in own.items()}
        for tensor, own in zip(tensors, dims, strict=True)
    ]


def number_of(value: Any) -> Any:
    """The number of the capture that one of torch's symbols stands for, with its expression."""
    return expressed(hint_of(value), expression_of_symbol(value))
