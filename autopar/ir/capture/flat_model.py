"""A model as a function from a flat list of tensors to a flat list of tensors, as torch.export takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.ir.capture.detached_data import DataIsDetached
from autopar.ir.capture.flat_call import Call
from autopar.ir.capture.known_values import ConstantsAreKnown
from autopar.ir.capture.python_state.second_call import is_update
from autopar.ir.capture.python_state.state import Snapshot
from autopar.ir.capture.symbols import SymbolicDims
from autopar.ir.errors import CaptureError
from autopar.ir.torch_private import pytree


@dataclass(slots=True)
class Output:
    """The result of the model while it was traced: leaves that are tensors are marked by None.

    updates: buffers that were replaced by other tensors, in the order in which these are returned last. changed: other
    attributes, globals and containers that are not what they were.
    """

    spec: pytree.TreeSpec | None = None
    constants: list[Any] = field(default_factory=list)
    is_tensor: list[bool] = field(default_factory=list)
    has_loss: bool = False
    updates: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


class FlatModel(nn.Module):
    """The model from a flat list of tensors to a flat list of tensors, the loss first if there is one."""

    def __init__(
        self, model: nn.Module, call: Call, loss_fn: Callable[..., Any] | None, dims: SymbolicDims | None = None
    ) -> None:
        """dims: of the tensors, those that are symbols in a trace."""
        super().__init__()
        self.model = model
        self._call, self._dims = call, dims
        self._loss_fn = [loss_fn]  # in a list: a module here would become part of the model
        self.output = Output()

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Outputs of a call on ``tensors``, then new values of the attributes that it updates; restores Python
        state."""
        if self._dims is not None:
            self._dims.check(tensors)
        state = Snapshot.take(self.model, self._loss_fn[0])
        try:
            outputs = self.outputs(*tensors)
            changes, filled = state.changes(), state.filled()
        finally:
            state.restore()
        updates = {f"{c.module}.{c.key}".removeprefix("."): c.new for c in changes if is_update(c)}
        self.output.updates[:] = updates
        self.output.changed[:] = [
            *(change.name for change in changes if not is_update(change)),
            *state.iterators,
            *filled,
        ]
        return [*outputs, *updates.values()]

    def outputs(self, *tensors: Tensor) -> list[Tensor]:
        """The loss, if there is one, and the tensors that the model returns."""
        with DataIsDetached(), ConstantsAreKnown():
            return self._outputs(*tensors)

    def _outputs(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs, target = self._call.rebuilt(tensors)
        result = self.model(*args, **kwargs)
        loss_fn = self._loss_fn[0]
        loss = loss_fn(result, target) if loss_fn is not None else _loss_in(result)
        if loss_fn is not None and (not isinstance(loss, Tensor) or loss.numel() != 1):
            raise CaptureError(f"loss_fn returned {_described(loss)}; a scalar tensor is needed")
        leaves, spec = pytree.tree_flatten(result)
        output = self.output  # filled in place: torch.export puts attributes back after the trace
        output.spec, output.has_loss = spec, loss is not None
        output.constants[:] = [leaf if isinstance(leaf, (int, float, bool, str)) else None for leaf in leaves]
        output.is_tensor[:] = [isinstance(leaf, Tensor) for leaf in leaves]
        tensors_out = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return ([loss] if loss is not None else []) + tensors_out


def _loss_in(result: Any) -> Tensor | None:
    if isinstance(result, Tensor):
        return result if result.dim() == 0 else None
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
