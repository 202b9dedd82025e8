"""This rank's part of every parameter and buffer: cut from the user's model, or initialised if it is on meta."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.errors import InvalidInput
from autopar.ir.placement import Layout, Shard
from autopar.ir.program import ParameterLayout, StageProgram
from autopar.runtime.mesh import JobMesh


def cut_axes(programs: Iterable[StageProgram]) -> tuple[int, ...]:
    """Mesh axes of several ranks on which some parameter of the plan is cut, ZeRO left aside."""
    cut = {
        axis
        for program in programs
        for layout in program.parameters.values()
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


def materialize(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    buffers: Sequence[str],
    cut: Sequence[int],
    mesh: JobMesh,
    device: torch.device,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a stage, by original name.

    A parameter is a DTensor over the mesh axes ``cut``, but for those that ZeRO has it on; plain if none is left.

    The model's own tensors are copied, only this rank's part of them; those on the meta device are initialised
    by the modules they belong to (``initialize``), from ``seed`` and the module's name, so that every plan
    starts from the same values.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    state: dict[str, torch.Tensor] = {}
    # Name in the model -> what is stored of it: itself, or pieces.
    wanted: dict[str, list[str]] = {name: [name] for name in buffers}
    for name, layout in layouts.items():
        wanted.setdefault(layout.parameter.whole_names[0], []).append(name)

    def keep(whole_name: str, whole: torch.Tensor) -> None:
        for name in wanted[whole_name]:
            layout = layouts.get(name)
            keep_one(name, whole if layout is None else layout.parameter.of(whole), layout)

    def keep_one(name: str, full: torch.Tensor, layout: ParameterLayout | None) -> None:
        source = full.detach()
        part = source if layout is None else local_shard(source, layout.layout, mesh)
        piece = part.to(device).contiguous()
        if piece is part:
            piece = part.clone()
        if layout is None:
            state[name] = piece
            return
        axes = [axis for axis in cut if axis not in layout.zero_axes]
        submesh = mesh.submesh(axes)
        if submesh is not None:
            placements = [layout.layout[axis] for axis in axes]
            piece = DTensor.from_local(
                piece, submesh, placements, run_check=False, shape=full.shape, stride=_strides(full.shape)
            )
        trainable = layout.parameter.requires_grad
        state[name] = nn.Parameter(piece, requires_grad=trainable)

    missing = [name for name in wanted if named[name].is_meta]
    for name in wanted:
        if not named[name].is_meta:
            keep(name, named[name])
    if missing:
        initialize(model, missing, keep, seed)
    return {name: state[name] for name in (*layouts, *buffers)}


def initialize(model: nn.Module, names: Sequence[str], keep: Callable[[str, torch.Tensor], None], seed: int) -> None:
    """Give values to tensors of a meta model and pass each to ``keep(name, value)``.

    Module by module on the CPU: ``reset_parameters()`` of the module, then ``_init_weights(module)`` of the model
    if it has one (as Hugging Face models and many others do). Raises InvalidInput, naming them, if tensors are
    left without a value. The user's model stays on meta.
    """
    of_module: dict[str, list[str]] = {}
    for name in names:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    hook = getattr(model, "_init_weights", None)
    unset: list[str] = []
    for path, own in of_module.items():
        original = model.get_submodule(path)
        # Shallow: only this module's own tensors become real.
        module = copy.copy(original)
        module._parameters = {k: p if p is None else nn.Parameter(_blank(p)) for k, p in original._parameters.items()}
        module._buffers = {k: b if b is None else _blank(b) for k, b in original._buffers.items()}
        digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            if callable(hook):
                hook(module)
        for name in own:
            leaf = name.rpartition(".")[2]
            value = module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
            assert value is not None, "a tensor of the captured model"
            if value.is_meta or _is_blank(value):
                unset.append(f"{name} ({type(original).__name__})")
            else:
                keep(name, value)
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


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))
