"""This rank's part of every parameter and buffer: made without values, then filled from wherever they come."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.errors import InvalidInput, PlanMismatch
from autopar.ir.placement import Layout, Shard
from autopar.ir.program import ParameterLayout, StageProgram
from autopar.ir.torch_private import is_fake, own_buffers, own_parameters, with_own
from autopar.runtime.mesh import JobMesh

# Axes of a DTensor, ZeRO's aside, that FSDP2 takes.
MOST_AXES = 2


def cut_axes(programs: Iterable[StageProgram]) -> tuple[int, ...]:
    """Mesh axes of several ranks on which some parameter of the plan is cut, ZeRO left aside."""
    cut = {
        axis
        for program in programs
        for layout in program.held.values()
        for axis, placement in enumerate(layout.layout)
        if not placement.is_replicate() and program.mesh.sizes[axis] > 1
    }
    return tuple(sorted(cut))


def local_shard(full: torch.Tensor, layout: Layout, mesh: JobMesh) -> torch.Tensor:
    """A view of the part of ``full`` that this rank stores."""
    for placement, axis, coordinate in zip(layout, mesh.stage_mesh.axes, mesh.coordinates, strict=True):
        if isinstance(placement, Shard):
            length = full.shape[placement.dim] // axis.size
            full = full.narrow(placement.dim, coordinate * length, length)
    return full


def blank_state(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    buffers: Sequence[str],
    cut: Sequence[int],
    mesh: JobMesh,
    device: torch.device,
    later: Container[str],
) -> dict[str, torch.Tensor]:
    """Parameters and buffers of this rank without values, by original name.

    A parameter is a DTensor over the mesh axes ``cut``, but for those that ZeRO has it on; plain if none is left.
    later: names of those that are on the meta device for now, since ZeRO will leave this rank but a part of them.
    Those of a model of fake tensors are fake, and take no memory anyway.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    state: dict[str, torch.Tensor] = {}
    for name, layout in layouts.items():
        parameter = layout.parameter
        source = named[parameter.whole_names[0]].detach()
        own = torch.device("meta") if name in later and not is_fake(source) else device
        whole = torch.empty(parameter.shape, device="meta")
        piece = source.new_empty(local_shard(whole, layout.layout, mesh).shape, dtype=parameter.dtype, device=own)
        groups = _axes_of(layout, cut)
        if len(groups) > MOST_AXES and name in later:
            words = ", ".join(f"{mesh.stage_mesh.names[axes[0]]} {layout.layout[axes[0]]}" for axes in groups)
            raise PlanMismatch(
                f"zero: parameter {name} is placed in {len(groups)} ways on mesh axes beside those of ZeRO "
                f"({words}); FSDP2 shards parameters of at most {MOST_AXES}.\n"
                "  try: zero: 0, or a plan with fewer of tensor, context and expert parallelism"
            )
        submesh = mesh.joined(groups)
        if submesh is not None:
            placements = [layout.layout[group[0]] for group in groups]
            piece = DTensor.from_local(
                piece, submesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        state[name] = nn.Parameter(piece, requires_grad=parameter.requires_grad)
    return state | {name: named[name].new_empty(named[name].shape, device=device) for name in buffers}


def make_meshes(programs: Sequence[StageProgram], mesh: JobMesh) -> None:
    """Make the meshes that parameters are DTensors over. All ranks call together, with all programs."""
    cut = cut_axes(programs)
    every = {tuple(_axes_of(layout, cut)) for program in programs for layout in program.held.values()}
    for groups in sorted(every):
        mesh.joined(groups)


def _axes_of(layout: ParameterLayout, cut: Sequence[int]) -> list[tuple[int, ...]]:
    """The mesh axes of each dimension of a parameter's mesh: those of ``cut`` that ZeRO does not have.

    One each, or where that are too many for FSDP, one for neighbours on which the parameter is placed alike.
    """
    axes = [axis for axis in cut if axis not in layout.zero_axes]
    if len(axes) <= MOST_AXES:
        return [(axis,) for axis in axes]
    return [tuple(group) for _, group in groupby(axes, key=layout.layout.__getitem__)]


def fill(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    buffers: Sequence[str],
    values: Mapping[str, torch.Tensor],
    put: Callable[[str, torch.Tensor], None],
    seed: int,
) -> None:
    """Pass the whole value of every parameter and buffer to ``put(name, value)``, which keeps this rank's part.

    values: by names of the model, before its own; lazy ones are read as far as ``put`` reads them. The model's own
    tensors come next; those on the meta device are initialised by the modules they belong to (``initialize``), from
    ``seed`` and the module's name, so that every plan starts from the same values.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    # Name in the model -> what is stored of it: itself, or pieces.
    wanted: dict[str, list[str]] = {name: [name] for name in buffers}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, layout in layouts.items():
        whole = layout.parameter.whole_names[0]
        wanted.setdefault(whole, []).append(name)
        aliases[whole] = layout.parameter.whole_names

    def keep(whole_name: str, whole: torch.Tensor) -> None:
        for name in wanted[whole_name]:
            put(name, whole if name not in layouts else layouts[name].parameter.of(whole))

    missing = []
    for name in wanted:
        given = next((values[alias] for alias in aliases.get(name, (name,)) if alias in values), None)
        if given is not None or not named[name].is_meta:
            keep(name, named[name].detach() if given is None else given)
        else:
            missing.append(name)
    if missing:
        initialize(model, missing, keep, seed, given=values)


def initialize(
    model: nn.Module,
    names: Sequence[str],
    keep: Callable[[str, torch.Tensor], None],
    seed: int,
    *,
    given: Container[str] = (),
) -> None:
    """Give values to tensors of a meta model and pass each to ``keep(name, value)``.

    Module by module on the CPU: ``reset_parameters()`` of the module, then ``_init_weights(module)`` of the innermost
    module around it that has one (as Hugging Face models and many others do). Raises InvalidInput, naming them, if
    tensors are left without a value. The user's model stays on meta.

    given: names of tensors that have values from elsewhere, for which no memory is taken.
    """
    of_module: dict[str, list[str]] = {}
    for name in names:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    unset: list[str] = []
    for path, own in of_module.items():
        original = model.get_submodule(path)

        def blank(leaf: str, value: torch.Tensor | None, path: str = path) -> torch.Tensor | None:
            if value is None:
                return None
            name = f"{path}.{leaf}" if path else leaf
            return torch.empty_like(value, device="meta") if name in given else _blank(value)

        # Shallow: only this module's own tensors become real.
        parameters = {
            k: v if (v := blank(k, p)) is None else nn.Parameter(v, requires_grad=v.is_floating_point())
            for k, p in own_parameters(original).items()
        }
        module = with_own(original, parameters, {k: blank(k, b) for k, b in own_buffers(original).items()})
        digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            hook = _hook(model, path)
            if hook is not None:
                hook(module)
        for name in own:
            leaf = name.rpartition(".")[2]
            value = {**own_buffers(module), **own_parameters(module)}[leaf]
            assert value is not None, "a tensor of the captured model"
            if value.is_meta or _is_blank(value):
                unset.append(f"{name} ({type(original).__name__})")
            else:
                keep(name, value.detach())
    if unset:
        listed = "\n".join(f"  {name}" for name in unset[:8]) + ("\n  ..." if len(unset) > 8 else "")
        raise InvalidInput(
            f"the model is on the meta device and {len(unset)} of its tensors cannot be initialised:\n{listed}\n"
            "  expected: modules with a reset_parameters() method, or a model with an _init_weights(module) method\n"
            "  try: build the model on the CPU, or give these modules a reset_parameters() method"
        )


_INT_BLANK = -87


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor of values that no initialisation leaves: what is still blank later was not initialised."""
    real = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return real.fill_(float("nan")) if real.is_floating_point() else real.fill_(_INT_BLANK)


def _is_blank(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return False
    blank = torch.isnan(tensor) if tensor.is_floating_point() else tensor == _INT_BLANK
    return bool(blank.any())


def _hook(model: nn.Module, path: str) -> Callable[[nn.Module], Any] | None:
    """``_init_weights`` of the innermost module around ``path``, itself included, that has one and takes the
    module to initialise; None if there is none."""
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):
        hook = getattr(model.get_submodule(".".join(parts[:end])), "_init_weights", None)
        if callable(hook) and len(inspect.signature(hook).parameters) == 1:
            return hook
    return None
