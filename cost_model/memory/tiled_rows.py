"""Wide layers that a rank computes in tiles of rows, under full rematerialisation (``runtime/tiled.py``).

in backward     what the ops of a tile make, and its gradients; gradients of weights in float32
not at all      what these ops make of the other rows, which full rematerialisation would have made again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from torch import fx

from autopar.cost_model.memory.saved_tensors import Saved
from autopar.ir.analysis.row_regions import RowRegion, row_regions
from autopar.ir.building import shape_of
from autopar.ir.graph import source, tensor_operands, tensor_results
from autopar.ir.lowered import row_tiles
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule, factors_of_choice

# Bytes of a number in float32; how often what a tile makes is there at once: with its gradients.
_WIDE, _COPIES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A region in tiles, on one rank, for one microbatch.

    working_bytes: of a tile. wide_bytes: of the gradients of weights while they are added up. summed_bytes: that pass
    through memory then.
    """

    working_bytes: float
    wide_bytes: float
    summed_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TileableRegion:
    """A region of rows that a rank with many of them computes in tiles.

    made: what its ops make that is not handed on. result: what it hands on. weights: its parameters that have a
    gradient. edges: (op, result, reader, operand) inside it. rules: of its ops.
    """

    region: RowRegion
    made: tuple[Saved, ...]
    result: Saved
    weights: tuple[Saved, ...]
    edges: tuple[tuple[fx.Node, int, fx.Node, int], ...]
    rules: Mapping[fx.Node, FactorRule]

    def tile(self, assignments: Mapping[fx.Node, Assignment], mesh: Mesh, num_microbatches: int = 1) -> Tile | None:
        """What the region needs under ``assignments``; None if a rank has little of it, or something moves inside."""
        for maker, number, reader, position in self.edges:
            made, read = self.rules[maker], self.rules[reader]
            for before, after in zip(assignments[maker], assignments[reader], strict=True):
                placement = made.result(number, before)
                if placement.is_partial() or placement != read.operand(position, after)[0]:
                    return None
        last = self.region.result
        rule, assignment = self.rules[last], assignments[last]
        if len(tensor_operands(last)) > 2 and any(rule.result(0, choice).is_partial() for choice in assignment):
            return None  # a bias that every rank adds a part of

        def elements(tensor: Saved) -> float:
            return tensor.local_bytes(assignments[tensor.node], mesh, num_microbatches) / tensor.itemsize

        columns = set(rule.results[0][-1])
        own = float(shape_of(last)[-1])
        for axis, choice in zip(mesh.axes, assignment, strict=True):
            own /= 1 if columns.isdisjoint(factors_of_choice(choice)) else axis.size
        rows = elements(self.result) / own
        width = sum(map(elements, self.made)) / rows
        at_once = row_tiles.rows_at_once(rows, width)
        if at_once is None:
            return None
        num_bytes = sum(elements(tensor) * tensor.itemsize for tensor in self.made)
        wide = sum(elements(weight) * max(_WIDE, weight.itemsize) for weight in self.weights)
        narrow = sum(elements(weight) * weight.itemsize for weight in self.weights)
        return Tile(
            working_bytes=_COPIES * num_bytes * at_once / rows + narrow,
            wide_bytes=wide,
            summed_bytes=ceil(rows / at_once) * 2 * (wide + narrow),
        )


def tileable_regions(
    nodes: Sequence[fx.Node],
    entry: Callable[[fx.Node, fx.Node | None, int], Saved],
    rules: Callable[[fx.Node], FactorRule],
    flows: Callable[[fx.Node], bool],
) -> tuple[TileableRegion, ...]:
    """The regions of a block that may ever be in tiles. entry, flows: as of ``ChunkableLoss.of``."""
    if not any(value.numel() * len(nodes) > row_tiles.LIMIT for node in nodes for value in tensor_results(node)):
        return ()
    return tuple(_tileable(region, entry, rules, flows) for region in row_regions(nodes, rules) if flows(region.result))


def _tileable(
    region: RowRegion,
    entry: Callable[[fx.Node, fx.Node | None, int], Saved],
    rules: Callable[[fx.Node], FactorRule],
    flows: Callable[[fx.Node], bool],
) -> TileableRegion:
    inside = {*region.made, region.result}
    edges, weights = [], []
    for node in (*region.made, region.result):
        for position, operand in enumerate(tensor_operands(node)):
            producer, number = source(operand)
            if producer in inside:
                edges.append((producer, number, node, position))
            elif operand in region.others and flows(operand):
                weights.append(entry(node, operand, position))
    return TileableRegion(
        region=region,
        made=tuple(entry(node, None, p) for node in region.made for p in range(len(tensor_results(node)))),
        result=entry(region.result, None, 0),
        weights=tuple(weights),
        edges=tuple(edges),
        rules={node: rules(node) for node in inside},
    )


def tiles(
    regions: Iterable[TileableRegion],
    assignments: Mapping[fx.Node, Assignment],
    mesh: Mesh,
    num_microbatches: int = 1,
) -> dict[RowRegion, Tile]:
    """Those of ``regions`` that are computed in tiles under ``assignments``, and what they need."""
    found = ((own.region, own.tile(assignments, mesh, num_microbatches)) for own in regions)
    return {region: tile for region, tile in found if tile is not None}
