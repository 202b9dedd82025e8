"""Arguments that carry sizes, rewritten so that an op on local shards gives the local result.

view(x, [8, 32, 4, 16])  ->  view(x, [4, 32, 2, 16])      with the batch and the heads sharded over 2 each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autopar.ir.graph import tensor_results
from autopar.ir.rules.call import op_name, parameters
from autopar.ir.rules.factors import aten
from autopar.ir.sizes import Ratio, Size
from autopar.ir.torch_private import OpOverload, pytree, schema_of

# (argument, global shape of the first result, local shape) -> local argument
_Rewrite = Callable[[Any, Sequence[int], Sequence[int]], Any]

# Types of arguments that are numbers to compute with.
_NUMBERS = frozenset({"Scalar", "Tensor", "float", "number", "Optional[number]", "Optional[float]"})


def local_arguments(node: fx.Node, shape: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of ``node`` for one rank, where its first result has the local ``shape``.

    Operands are still the nodes of the global graph. Arguments without sizes are untouched.
    """
    args, kwargs = list(node.args), dict(node.kwargs)
    changes = _REWRITES.get(op_name(node.target))  # type: ignore[arg-type]  # call_function targets are callable
    if changes is None:
        return tuple(args), kwargs
    results = tensor_results(node)
    whole = tuple(results[0].shape)
    names = [name for name, _ in parameters(node.target)]  # type: ignore[arg-type]
    for name, rewrite in changes.items():
        if name in kwargs:
            kwargs[name] = rewrite(kwargs[name], whole, tuple(shape))
        elif name in names and names.index(name) < len(args):
            position = names.index(name)
            args[position] = rewrite(args[position], whole, tuple(shape))
    return tuple(args), kwargs


def map_sizes(node: fx.Node, change: Callable[[Size], int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of ``node`` with ``change`` of every argument that is the size of a tensor in symbols."""

    def of_size(leaf: Any, is_number: bool) -> Any:
        return change(leaf) if isinstance(leaf, Size) and not is_number else leaf

    return _map(node, of_size)


def numbers_of(node: fx.Node) -> list[Size | Ratio]:
    """The numbers with symbols that ``node`` computes with: a divisor, not a shape."""
    found: list[Size | Ratio] = []

    def collect(leaf: Any, is_number: bool) -> Any:
        if is_number and isinstance(leaf, Size | Ratio):
            found.append(leaf)
        return leaf

    _map(node, collect)
    return found


def _map(node: fx.Node, change: Callable[[Any, bool], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` with ``change`` of every leaf, which is told whether the op computes with it.

    Ops without a signature of types (composite ones) take lengths and floats.
    """
    kinds: dict[str, str] = {}
    if isinstance(node.target, OpOverload):
        kinds = {argument.name: str(argument.type) for argument in schema_of(node.target).arguments}

    def mapped(name: str, value: Any) -> Any:
        counts = kinds.get(name) in _NUMBERS
        return pytree.tree_map(lambda leaf: change(leaf, counts or isinstance(leaf, Ratio)), value)

    names = [*kinds, *[""] * len(node.args)]
    args = tuple(mapped(name, value) for name, value in zip(names, node.args, strict=False))
    return args, {name: mapped(name, value) for name, value in node.kwargs.items()}


def _result_shape(_: Any, __: Sequence[int], shape: Sequence[int]) -> list[int]:
    return list(shape)


def _copies(repeats: Sequence[int], whole: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Whole copies of a dimension are sharded, or else the dimension itself, of which there is one copy."""
    padded = [1] * (len(whole) - len(repeats)) + list(repeats)
    local = [count * part // full if count > 1 else 1 for count, full, part in zip(padded, whole, shape)]
    return local[len(whole) - len(repeats) :]


def _of_channels(groups: int, whole: Sequence[int], shape: Sequence[int]) -> int:
    """Groups of channels (dimension 1) are sharded with the channels."""
    return groups * shape[1] // whole[1] if groups > 1 else groups


def _batch(_: int, __: Sequence[int], shape: Sequence[int]) -> int:
    return shape[0]


def _channels(_: int, __: Sequence[int], shape: Sequence[int]) -> int:
    return shape[1]


_SHAPED: dict[str, _Rewrite] = {"size": _result_shape}
_REWRITES: dict[str, dict[str, _Rewrite]] = {
    "aten::reshape": {"shape": _result_shape},
    "aten::repeat": {"repeats": _copies},
    "aten::tile": {"dims": _copies},
    "aten::group_norm": {"num_groups": _of_channels},
    "aten::native_group_norm": {"N": _batch, "C": _channels, "group": _of_channels},
}
for _name in aten(
    "view _unsafe_view view_copy expand broadcast_to full zeros ones empty new_full new_zeros new_ones new_empty rand "
    "randn randint normal empty_permuted"
):
    _REWRITES[_name] = _SHAPED
for _name in aten("conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d"):
    _REWRITES[_name] = {"groups": _of_channels}
