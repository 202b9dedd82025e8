"""Checks of a captured model before anything is planned: what it reads has values, what it writes has a place.

every constant has values             a tensor that was made while a stand-in ran has none
every write has a home                a buffer is given its new value after each step; nothing else is
the loss depends on what is trained   through ops that have a gradient, if anything is trained at all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx, nn

from autopar.ir.analysis.gradient_paths import carries_gradient
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel
from autopar.ir.torch_private import FakeTensor, storage_of


def check_captured(captured: CapturedModel, writes: Mapping[str, str], *, training: bool) -> None:
    """Raise CaptureError if a captured model cannot be run, or in ``training`` trained, as the model itself is.

    writes: placeholder that forward writes to, buffers apart -> the source line of the write.
    """
    _constants_have_values(captured)
    _writes_have_a_home(captured, writes)
    if training:
        _loss_is_trained(captured)


def refuse_shared(model: nn.Module, title: str, replaced: Sequence[str]) -> None:
    """Raise CaptureError if one of the buffers that forward replaces by other tensors has another name as well.

    Under the other name the old tensor would stay.
    """
    slots: dict[int, dict[tuple[int, str], str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        slots.setdefault(id(buffer), {}).setdefault((id(model.get_submodule(path)), key), name)
    for names in slots.values():
        mine = [name for name in names.values() if name in replaced]
        if mine and len(names) > 1:
            others = ", ".join(name for name in names.values() if name != mine[0])
            raise CaptureError(
                f"{title} cannot be captured: forward replaces the buffer {mine[0]}, which is also {others}.\n"
                "  try: a write in place, as self.buffer.copy_(value), or a buffer of its own for each"
            )


def refuse_aliases(model: nn.Module, captured: CapturedModel, writes: Mapping[str, str]) -> None:
    """Raise CaptureError if a tensor that training changes is memory of another one too, which would not follow.

    writes: as in ``check_captured``.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moved = [buffer.name for buffer in captured.buffers.values() if buffer.updated_by is not None]
    changed = {**trained, **{name: model.get_buffer(name) for name in moved}}
    changed |= {name: captured.constants[name] for name in writes if name in captured.constants}
    others = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in others.items():
        by_storage.setdefault(storage_of(tensor), []).append((name, tensor))
    for name, tensor in changed.items():
        for other, alias in by_storage[storage_of(tensor)]:
            if alias is not tensor and _overlap(alias, tensor):
                _refuse_pair(captured, name, other, writes)


def _refuse_pair(captured: CapturedModel, name: str, other: str, writes: Mapping[str, str]) -> None:
    constant = next((own for own in (other, name) if own in captured.constants), None)
    if constant is None:
        raise CaptureError(
            f"{captured.name} cannot be captured: {name!r} and {other!r} share memory, which training changes.\n"
            "  try: one tensor under both names, or memory of its own for each"
        )
    readers = [user for user in _placeholder(captured, constant).users if user.op == "call_function"]
    if readers or constant in writes:
        owner = name if other == constant else other
        raise CaptureError(
            f"{captured.name} cannot be captured: {owner!r}, which training changes, shares memory with a tensor that "
            "forward uses besides, as a global variable or a view that was made before.\n"
            f"  at {writes.get(constant) or readers[0].meta.get('source') or 'an unknown line'}\n"
            f"  try: self.{owner} in forward"
        )


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one storage may have elements in common."""
    (start, end), (from_, to) = (_extent(t) for t in (x, y))
    return start < to and from_ < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    start = tensor.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(start), int(start + sum((n - 1) * step for n, step in steps)) + 1


def _constants_have_values(captured: CapturedModel) -> None:
    for name, value in captured.constants.items():
        if isinstance(value, FakeTensor) or value.is_meta:
            node = _placeholder(captured, name)
            reader = next((user for user in node.users if user.op == "call_function"), None)
            where = reader.meta.get("source") if reader is not None else None
            raise CaptureError(
                f"{captured.name} cannot be captured: it reads a tensor of shape {tuple(value.shape)} whose values are "
                f"not known.\n  at {where or 'an unknown line'}\n  try: self.register_buffer(...) for tensors that "
                "forward reads, and no tensor in forward that an earlier call has made"
            )


def _writes_have_a_home(captured: CapturedModel, writes: Mapping[str, str]) -> None:
    for name, line in writes.items():
        if name in captured.parameters:
            raise CaptureError(
                f"{captured.name} cannot be captured: forward writes to the parameter "
                f"{captured.parameters[name].name!r}, which only the optimiser may change.\n  at {line}\n"
                "  try: the write after optimizer.step(), or the changed value in place of the parameter, as in "
                "torch.nn.utils.parametrize"
            )
        if name in captured.constants and _placeholder(captured, name).users:
            raise CaptureError(
                f"{captured.name} cannot be captured: forward writes to a tensor that is neither a buffer nor a "
                f"parameter, and reads it in the next call.\n  at {line}\n"
                "  try: self.register_buffer(...) for a tensor that forward changes"
            )


def _loss_is_trained(captured: CapturedModel) -> None:
    loss = captured.loss_node()
    if not isinstance(loss, fx.Node):
        return
    names = {name for name, parameter in captured.parameters.items() if parameter.requires_grad}
    trained = {node for node in captured.graph.nodes if node.op == "placeholder" and node.name in names}
    if not trained or carries_gradient(loss, trained):
        return
    raise CaptureError(
        f"{captured.name} cannot be trained: its loss does not depend on any parameter that requires a gradient.\n"
        f"  at {loss.meta.get('source') or 'an unknown line'}\n"
        "  try: a loss without detach(), no_grad() or integer ops between it and the parameters"
    )


def _placeholder(captured: CapturedModel, name: str) -> fx.Node:
    found = next(node for node in captured.graph.nodes if node.op == "placeholder" and node.name == name)
    assert isinstance(found, fx.Node)
    return found
