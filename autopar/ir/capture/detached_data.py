"""``tensor.data`` in a trace: a detached view when it is read, a copy into one when it is set."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_GET, _SET = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


class DataIsDetached(TorchFunctionMode):
    """A tracer does not see ``.data``: what it gives is a tensor from nowhere, and what it is given is forgotten."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET:
            return args[0].detach()
        if func == _SET:
            tensor, value = args
            if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                raise RuntimeError(
                    f".data of a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is set to a {value.dtype} tensor "
                    f"of shape {tuple(value.shape)}"
                )
            return tensor.detach().copy_(value)
        return func(*args, **(kwargs or {}))
