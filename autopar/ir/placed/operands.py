"""The uses of a placed model's tensors by its ops, outputs and buffers, as one program of it runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

from autopar.ir.analysis.blocks import PRELUDE
from autopar.ir.analysis.zigzag import ZigzagDim
from autopar.ir.errors import PlanMismatch
from autopar.ir.graph import source, tensor_operands
from autopar.ir.placed.layouts import Need
from autopar.ir.placed.placed_model import PlacedModel
from autopar.ir.placed.uses import Chains, Use
from autopar.ir.placement import Layout, Placement, Replicate, Shard, replicated
from autopar.ir.precision import narrow_dtype
from autopar.ir.redistribution import Collective, Step, redistribute

Results = Literal["loss", "model"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Operands:
    """How the ops of a placed model have their operands in one of its programs.

    results: "loss" of a training step, whose gradient comes back from the loss; "model" of a plain forward, whose
    outputs are handed to the caller and may all have a gradient.
    """

    placed: PlacedModel
    results: Results
    chains: Chains = field(default_factory=Chains)

    @cached_property
    def flow(self) -> frozenset[fx.Node]:
        """The tensors that have a gradient."""
        analysis = self.placed.analysis
        return analysis.flow if self.results == "loss" else analysis.forward_flow

    def of(self, user: fx.Node, position: int) -> Use:
        """How ``user`` has operand ``position``."""
        placed, tensor = self.placed, tensor_operands(user)[position]
        need = placed.layouts.need_of(source(tensor)[0], user, position)
        wide = bool(placed.analysis.rule(user).couples)
        over_time, block = placed.needed_over_time(user, position), placed.analysis.block_of(user)
        if placed.zigzag is None:
            return self._use(tensor, need, over_time, block, wide=wide)
        into, back = (side.get((user, position), ()) for side in (placed.zigzag.into, placed.zigzag.back))
        return self._use(tensor, need, over_time, block, wide=wide, into=into, back=back)

    def handed_out(self, tensor: fx.Node, layout: Layout, over_time: Placement, block: int) -> Use:
        """How the caller or a buffer has ``tensor``: in ``layout`` and in natural order."""
        zigzag = self.placed.zigzag
        back = () if zigzag is None else zigzag.results.get(source(tensor), ())
        return self._use(tensor, Need(layout, layout), over_time, block, back=back)

    def output_layout(self, tensor: fx.Node) -> tuple[Layout, Placement]:
        """Layout of a model output as the caller has it, and over microbatches: rows of its batch, otherwise whole.

        The caller adds up what microbatches have summands of.
        """
        placed = self.placed
        dim = placed.analysis.roles.batch_dim.get(tensor)
        if dim is None:
            time = placed.over_time(tensor)
            return replicated(placed.mesh), time if time.is_partial() else Replicate()
        rows = tuple(Shard(dim) if choice is not None else Replicate() for choice in placed.layouts.inputs)
        return rows, Shard(dim)

    def sums_over_time(self, new: fx.Node) -> bool:
        """Whether every microbatch computes a summand of ``new``, the new value of a buffer."""
        return self.placed.over_time(new).is_partial() and self.placed.analysis.block_of(new) != PRELUDE

    def update_of(self, new: fx.Node) -> Use:
        """How a buffer has its new value: whole on every rank, of every microbatch or as a summand."""
        over_time = self.placed.over_time(new) if self.sums_over_time(new) else Replicate()
        return self.handed_out(new, replicated(self.placed.mesh), over_time, self.placed.analysis.block_of(new))

    def _use(
        self,
        tensor: fx.Node,
        need: Need,
        over_time: Placement,
        block: int,
        *,
        wide: bool = False,
        into: tuple[ZigzagDim, ...] = (),
        back: tuple[ZigzagDim, ...] = (),
    ) -> Use:
        placed = self.placed
        made_in, time = placed.analysis.block_of(tensor), placed.over_time(tensor)
        total = time.is_partial() and over_time.is_replicate() and made_in == PRELUDE
        share = time.is_replicate() and over_time.is_partial()
        if placed.is_parameter(tensor):
            return self._read(tensor, need, block, wide=wide, share=share, back=back)
        if not (total or share) and time != over_time and placed.num_microbatches > 1:
            raise PlanMismatch(
                f"the batch cannot be cut into {placed.num_microbatches} microbatches: {tensor.name} "
                f"({tensor.meta.get('source', 'no source')}) does not keep the samples of a batch apart.\n"
                "  try: one microbatch (batch.num_microbatches: 1)"
            )
        steps = self._forward_only(tensor, redistribute(placed.layout(tensor), *need), total)
        if total:
            # Before the first microbatch, ahead of all blocks.
            block = PRELUDE
        start = PRELUDE if into or tensor.op != "call_function" else made_in
        moves = self.chains.chain(tensor, steps, placed.layout(tensor), block, start, into)
        return Use(tensor=tensor, block=block, into=into, moves=moves, total=total, share=share, back=back)

    def _forward_only(self, tensor: fx.Node, steps: tuple[Step, ...], total: bool) -> tuple[Step, ...]:
        """``steps`` without those that only concern a gradient, where there is none."""
        if tensor in self.flow and not total:
            return steps
        return tuple(step for step in steps if step.forward is not Collective.NONE)

    def _read(
        self, parameter: fx.Node, need: Need, block: int, *, wide: bool, share: bool, back: tuple[ZigzagDim, ...]
    ) -> Use:
        storage, mesh = self.placed.storage[parameter.name], self.placed.mesh
        read = self.chains.read(
            parameter,
            block,
            storage.scale(need, mesh),
            wide or narrow_dtype(self.placed.plan.precision) is None,
        )
        steps = self._forward_only(parameter, storage.steps(need), False)
        moves = self.chains.chain(parameter, steps, storage.layout, block, block, read)
        return Use(tensor=parameter, block=block, read=read, moves=moves, share=share, back=back)
