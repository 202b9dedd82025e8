"""Split-stages: the program of one rank as one program for each pipeline stage."""

from __future__ import annotations

from torch import fx

from autopar.ir.analysis.gradient_flow import flow_to
from autopar.ir.building import dtype_of, shape_of
from autopar.ir.placed.zero_units import zero_units
from autopar.ir.program import ParameterLayout, StageProgram, TensorSpec
from autopar.passes.block_graphs import BlockGraphs
from autopar.passes.placed_program import PlacedProgram
from autopar.passes.stage_cut import StageCut


def split_stages(program: PlacedProgram) -> tuple[StageProgram, ...]:
    """One program per stage of the plan. Raises PlanMismatch where a tensor cannot cross a cut."""
    placed, outputs = program.placed, program.results
    captured, plan, storage = placed.captured, placed.plan, placed.storage
    cut = StageCut(program)
    graphs = BlockGraphs(cut)
    ends = [] if outputs == "model" else program.outputs[:1]  # a plain forward hands no gradient back
    flow = flow_to(program.graph, captured.parameters, ends)
    trained = frozenset(captured.parameters[n.name].name for n in flow if n.name in captured.parameters)
    readers, idle = cut.parameter_stages(), cut.idle_parameters()
    layouts = {
        name: ParameterLayout(
            parameter=parameter,
            layout=storage[name].layout,
            partial_axes=storage[name].partial_axes,
            zero_axes=storage[name].zero_axes,
            stages=(idle[name],) if name in idle else tuple(sorted(readers[name])),
        )
        for name, parameter in captured.parameters.items()
    }
    units = zero_units(placed) if outputs == "loss" or not captured.has_loss else ()
    by_name = {layout.parameter.name: layout for layout in layouts.values()}
    input_layouts = placed.input_layouts()
    programs = []
    for number in range(plan.num_stages):
        blocks, totals = graphs.blocks(number), graphs.totals(number)
        parts = (*totals, *blocks)
        read_by_many, buffers_of_many = cut.shared(number)
        held = {p for b in blocks for p in b.parameters} | set(read_by_many)
        updates = {name: node.name for name, node in program.updates.items() if cut.stage_of(node) == number}
        used_buffers = {b for block in parts for b in block.buffers} | {*buffers_of_many, *updates}
        wanted = {name for block in parts for name in block.inputs} | {n.name for n in program.outputs}
        last = number == plan.num_stages - 1
        whole = last and outputs == "model"
        mine = [
            n.name if whole or cut.stage_of(n) == number or n.op == "placeholder" else None for n in program.outputs
        ]
        loss = mine[0] if outputs == "loss" and mine else None
        partial = program.output_layouts[0] if program.output_layouts else ()
        programs.append(
            StageProgram(
                stage=number,
                num_stages=plan.num_stages,
                mesh=plan.stage_mesh,
                blocks=blocks,
                inputs={name: step.key for name, step in captured.inputs.items() if name in wanted},
                received=tuple(_spec(n, has_gradient=n in flow) for n in cut.crossing(number)),
                sent=tuple(_spec(n, has_gradient=n in flow) for n in cut.crossing(number + 1)),
                parameters={name: layout for name, layout in by_name.items() if name in held},
                buffers={b.name: b for b in captured.buffers.values() if b.name in used_buffers},
                constants={name: value for name, value in captured.constants.items() if name in wanted},
                shared_parameters=tuple(read_by_many),
                shared_buffers=tuple(buffers_of_many),
                buffer_updates=updates,
                summed_updates=program.summed & updates.keys(),
                outputs=tuple(mine),
                output_layouts=tuple(
                    layout if name is not None else None
                    for name, layout in zip(mine, program.output_layouts, strict=True)
                ),
                loss=loss,
                loss_partial_axes=tuple(axis for axis, p in enumerate(partial) if p.is_partial()) if loss else (),
                num_microbatches=plan.batch.num_microbatches,
                shard_axes=placed.shard_axes,
                input_layouts={name: layout for name, layout in input_layouts.items() if name in wanted},
                totals=totals,
                trained=trained & held,
                unread={captured.parameters[n].name: layouts[n] for n, stage in idle.items() if stage == number},
                output_microbatches=program.output_microbatches if whole else (),
                output_specs=tuple(map(_spec, program.outputs)) if whole else (),
                zero_units=tuple(unit for unit in units if unit.stage == number),
                sizes=program.sizes,
            )
        )
    return tuple(programs)


def _spec(node: fx.Node, *, has_gradient: bool = False) -> TensorSpec:
    return TensorSpec(name=node.name, shape=shape_of(node), dtype=dtype_of(node), has_gradient=has_gradient)
