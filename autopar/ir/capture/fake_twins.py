"""Stand-ins for capture: a model and its inputs with fake tensors in place of real storage.

The user's model is not touched and no parameter is copied: its module tree is copied with every parameter
and buffer already replaced. The fakes claim to be CPU tensors, wherever the originals are, so that tensors
that a forward makes without naming a device mix with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.capture.python_state.closures import rebind
from autopar.ir.errors import CaptureError
from autopar.ir.torch_private import FakeTensorMode

# ``loss_fn(output, target)``.
LossFunction = Callable[..., Any]


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor of the same shape, strides and dtype."""
    shapes = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    return mode.fake_tensor_converter.from_meta_and_device(mode, shapes, torch.device("cpu"))


def fake_model(
    model: nn.Module, loss_fn: LossFunction | None, mode: FakeTensorMode, training: bool = True
) -> tuple[nn.Module, LossFunction | None]:
    """A copy of the module tree with fake parameters and buffers, in train or eval mode, and the loss function of it.

    In the mode that ``model`` is in, every submodule keeps the mode that it is in, as one that is frozen; in the other,
    all are in it, as ``model.train(training)`` would have them. A loss function that closes over the model is rebuilt.
    Raises CaptureError if the module tree cannot be copied, or has plain tensor attributes without storage.
    """

    def fake(tensor: Tensor) -> Tensor:
        return fake_like(tensor, mode)

    twin, own_loss_fn = _copied(model, loss_fn, fake, fake)
    return twin if twin.training == training else twin.train(training), own_loss_fn


def without_parameters(model: nn.Module, loss_fn: LossFunction | None) -> tuple[nn.Module, LossFunction | None]:
    """A copy of the module tree with parameters on the meta device, to be captured when ``model`` may be gone.

    Buffers are those of ``model``. The loss function is as of ``fake_model``, whose errors are raised.
    """

    def on_meta(parameter: Tensor) -> Tensor:
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")

    return _copied(model, loss_fn, on_meta, lambda buffer: buffer)


def _copied(
    model: nn.Module,
    loss_fn: LossFunction | None,
    of_parameter: Callable[[Tensor], Tensor],
    of_buffer: Callable[[Tensor], Tensor],
) -> tuple[nn.Module, LossFunction | None]:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(of_parameter(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = of_buffer(buffer)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in memo:
                if value.is_meta:
                    where = f"{path}.{name}" if path else name
                    raise CaptureError(
                        f"{type(module).__name__}: tensor attribute {where!r} is on the meta device and is neither a "
                        f"parameter nor a buffer, so its value is unknown.\n  try: self.register_buffer({name!r}, ...)"
                    )
                memo[id(value)] = value.detach().cpu()
    try:
        twin: nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for capture: {error}\n"
            "  try: keep locks, files, process groups and non-leaf tensors out of the module's attributes"
        ) from error
    return twin, rebind(twin, memo, loss_fn)
