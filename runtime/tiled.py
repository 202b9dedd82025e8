"""Wide layers in tiles of rows: what lies between the linear layers is there for some rows at a time.

    forward     y[tile] = down(act(up(x[tile])))                                          nothing wide is kept
    backward    act(up(x[tile])) once more, its gradients, those of x[tile]; those of weights are added up

Under full rematerialisation what is wide in a block (an MLP's inner activations, their gradients) sets how many tokens
fit on a rank. Where a rank has many numbers of it, a region of rows (``ir/analysis/row_regions.py``) runs so. There are
as many products as without tiles: that of the last layer, which backward does not need, is not computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from autopar.ir.analysis.row_regions import RowRegion, row_regions
from autopar.ir.autograd.function_op import FunctionOp
from autopar.ir.building import shape_of
from autopar.ir.lowered.row_tiles import rows_at_once
from autopar.ir.ops.composite import columns_linear
from autopar.ir.primitives.collectives import apply
from autopar.ir.rule import FactorRule
from autopar.ir.rules import known_rule, rule_of_call
from autopar.ir.rules.call import call_of
from autopar.ir.sizes import Ratio, Size
from autopar.ir.torch_private import pytree


class _Form(NamedTuple):
    """columns: the last layer's weight is (in, out). weight, bias: places of its parameters among the operands. width:
    numbers that the ops before it make of a row. num_rows: operands that are read row by row, the first."""

    columns: bool
    weight: int
    bias: int | None
    width: int
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """A region as one call: what it reads row by row, then what it reads whole -> its result. inner: all but the last
    layer."""

    __name__: ClassVar[str] = "tiled"  # fx names nodes and what it calls so

    inner: Callable[..., Tensor]
    form: _Form

    def __call__(self, *operands: Tensor) -> Tensor:
        lead = operands[0].shape[:-1]
        at_once = rows_at_once(lead.numel(), self.form.width)
        if at_once is None:
            return self.last(self.inner(*operands), operands)
        dim = max(range(len(lead)), key=lead.__getitem__)
        tile = max(at_once * lead[dim] // lead.numel(), 1)
        begun = apply(_Begun, self, (dim, tile), *operands)
        return cast(Tensor, apply(_Done, begun, self, (dim, tile), [operand.detach() for operand in operands]))

    def last(self, x: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """The last layer."""
        layer = columns_linear if self.form.columns else torch.nn.functional.linear
        return layer(x, operands[self.form.weight], None if self.form.bias is None else operands[self.form.bias])

    def tiles(self, operands: Sequence[Tensor], cut: tuple[int, int]) -> Iterator[tuple[int, int, list[Tensor]]]:
        """First row of each tile, their number, and the operands for it. cut: along which dimension, rows of a tile."""
        dim, tile = cut
        size = operands[0].shape[dim]
        for start in range(0, size, tile):
            length = min(tile, size - start)
            rows = [operand.narrow(dim, start, length) for operand in operands[: self.form.num_rows]]
            yield start, length, [*rows, *operands[self.form.num_rows :]]


class _Begun(torch.autograd.Function):
    """Keeps the operands; its result stands for that of the region. The recomputation of a block may end here."""

    @staticmethod
    def forward(ctx: Any, region: Tiled, cut: tuple[int, int], *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.region, ctx.cut = region, cut
        weight = operands[region.form.weight]
        out = weight.shape[1 if region.form.columns else 0]
        return weight.new_empty(()).expand(*operands[0].shape[:-1], out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_gradients(ctx.region, ctx.cut, grad, ctx.saved_tensors, ctx.needs_input_grad[2:])


class _Done(torch.autograd.Function):
    """The result of the region."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, region: Tiled, cut: tuple[int, int], operands: list[Tensor]) -> Tensor:
        result = torch.empty_like(begun, memory_format=torch.contiguous_format)
        for start, length, part in region.tiles(operands, cut):
            result.narrow(cut[0], start, length).copy_(region.last(region.inner(*part), part))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


def _gradients(
    region: Tiled, cut: tuple[int, int], grad: Tensor, operands: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the operands that are ``wanted``, tile by tile. Sums over tiles are in float32 at least."""

    def total(operand: Tensor, is_row: bool) -> Tensor:
        wide = operand.dtype if is_row else torch.promote_types(operand.dtype, torch.float32)
        return torch.zeros_like(operand, dtype=wide, memory_format=torch.contiguous_format)

    found = [
        total(x, place < region.form.num_rows) if want else None
        for place, (x, want) in enumerate(zip(operands, wanted, strict=True))
    ]
    for start, length, part in region.tiles(operands, cut):

        def add(place: int, value: Tensor, start: int = start, length: int = length) -> None:
            own = found[place]
            if own is not None and place < region.form.num_rows:
                own.narrow(cut[0], start, length).copy_(value)
            elif own is not None:
                own.add_(value)

        leaves = [x.detach().requires_grad_(want) for x, want in zip(part, wanted, strict=True)]
        with torch.enable_grad():
            inner = region.inner(*leaves)
        x, weight, slope = inner.detach(), part[region.form.weight], grad.narrow(cut[0], start, length)
        flat, flat_slope = x.flatten(0, -2), slope.flatten(0, -2)
        if wanted[region.form.weight]:
            add(region.form.weight, flat.T @ flat_slope if region.form.columns else flat_slope.T @ flat)
        if region.form.bias is not None and wanted[region.form.bias]:
            add(region.form.bias, flat_slope.sum(0))
        del x, flat
        asked = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
        if inner.requires_grad:
            slope = slope @ (weight.T if region.form.columns else weight)
            gradients = torch.autograd.grad(inner, [leaves[place] for place in asked], slope, allow_unused=True)
            for place, value in zip(asked, gradients, strict=True):
                if value is not None:
                    add(place, value)
        del inner, slope, flat_slope
    return [None if own is None else own.to(x.dtype) for own, x in zip(found, operands, strict=True)]


def tiles_of(graph: fx.Graph) -> list[RowRegion]:
    """The regions of a block's program that run in tiles: a rank has much of them in a batch of the plan's size."""
    regions = row_regions([node for node in graph.nodes if node.op == "call_function"], _rule)
    return [r for r in regions if rows_at_once(prod(shape_of(r.result)[:-1]), r.width) is not None]


def _rule(node: fx.Node) -> FactorRule | None:
    """The factor rule of a local op; none of one that communicates, or that has a size which changes."""
    if any(isinstance(leaf, (Size, Ratio)) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
        return None
    call = call_of(node)
    return rule_of_call(call)[0] if isinstance(call.target, FunctionOp) else known_rule(call)


class TiledCalls:
    """The calls that replace regions; one for all that are alike but for names."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Tiled] = {}

    def of(self, region: RowRegion) -> tuple[Tiled, tuple[fx.Node, ...]]:
        """The call, and its operands."""
        operands = (*region.rows, *region.others)
        graph = fx.Graph()
        copied = {node: graph.placeholder(f"a{number}") for number, node in enumerate(operands)}
        for number, node in enumerate(region.nodes[:-1]):
            copied[node] = graph.node_copy(node, lambda n: copied[n])
            copied[node].name = f"n{number}"
        x, weight, *bias = region.result.args
        graph.output(copied[cast(fx.Node, x)])
        form = _Form(
            columns=region.result.target is columns_linear,
            weight=operands.index(cast(fx.Node, weight)),
            bias=operands.index(cast(fx.Node, bias[0])) if bias and bias[0] is not None else None,
            width=region.width,
            num_rows=len(region.rows),
        )
        code = graph.python_code("self")
        key = (code.src, *((name, id(value)) for name, value in sorted(code.globals.items())), form)
        if key not in self._made:
            self._made[key] = Tiled(fx.GraphModule(nn.Module(), graph).forward, form)
        return self._made[key], operands
