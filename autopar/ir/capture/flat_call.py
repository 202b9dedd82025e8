"""One call of a model as a flat list of leaves, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.ir.errors import CaptureError
from autopar.ir.torch_private import pytree


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Example inputs, flattened. leaves: of (args, kwargs), then of the target; tensors where tensors were."""

    leaves: tuple[Any, ...]
    keys: tuple[str, ...]
    in_spec: pytree.TreeSpec
    target_spec: pytree.TreeSpec | None
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Any, loss_fn: Callable[..., Any] | None, target: Any) -> Call:
        """The call of ``model`` with these example inputs. Raises CaptureError if ``loss_fn`` has no target."""
        args, kwargs = split_example(example_inputs)
        if loss_fn is not None and target is None:
            if "target" not in kwargs:
                raise CaptureError(
                    "loss_fn needs an example target.\n  try: example_target=..., or a 'target' in example_inputs"
                )
            kwargs = dict(kwargs)
            target = kwargs.pop("target")
        entries, in_spec = pytree.tree_flatten_with_path((args, kwargs))
        keys = [
            ("args" if path[0] == pytree.SequenceKey(0) else "kwargs") + pytree.keystr(path[1:]) for path, _ in entries
        ]
        leaves = [leaf for _, leaf in entries]
        target_spec = None
        if loss_fn is not None:
            targets, target_spec = pytree.tree_flatten_with_path(target)
            keys += ["target" + pytree.keystr(path) for path, _ in targets]
            leaves += [leaf for _, leaf in targets]
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise CaptureError(f"example_inputs hold no tensor: {type(example_inputs).__name__}")
        accepted = inspect.signature(model.forward).parameters
        # A key/value cache is state of generation; a training step has no use for it.
        extra = {"use_cache": False} if "use_cache" in accepted and "use_cache" not in kwargs else {}
        return cls(leaves=tuple(leaves), keys=tuple(keys), in_spec=in_spec, target_spec=target_spec, extra=extra)

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def tensor_keys(self) -> list[str]:
        """Keys of the leaves that are tensors."""
        return [key for key, leaf in zip(self.keys, self.leaves, strict=True) if isinstance(leaf, Tensor)]

    def rebuilt(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Any, Any]:
        """(args, kwargs, target) with ``tensors`` in place of the examples."""
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves[: self.in_spec.num_leaves], self.in_spec)
        target = None
        if self.target_spec is not None:
            target = pytree.tree_unflatten(leaves[self.in_spec.num_leaves :], self.target_spec)
        return args, {**kwargs, **self.extra}, target


def split_example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of example inputs: a tensor, a sequence of arguments or a dict of keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
