"""From the arguments of a call to the tensors that the program takes, checked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.capture.symbols import BATCH, named_dims
from autopar.ir.errors import InvalidInput
from autopar.ir.graph import CapturedModel
from autopar.ir.plan import Plan
from autopar.ir.torch_private import pytree
from autopar.runtime.call_sizes import GivenSizes


@dataclass(frozen=True, slots=True)
class _Input:
    """given_as: the key of the captured call; key: the same by the name of the argument, if it has one. names: of the
    dimensions that may have other sizes."""

    key: str
    given_as: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    names: Mapping[int, str]

    @property
    def label(self) -> str:
        """The name of the argument, if that is all there is to say."""
        found = re.fullmatch(r"kwargs\['(\w+)'\]", self.key)
        return found[1] if found else self.key


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors that a call passes in: placeholder name -> key, shape on one data-parallel rank, dtype."""

    inputs: dict[str, _Input]
    global_size: int
    data_parallel_size: int
    positional: tuple[str, ...]

    @classmethod
    def of(cls, captured: CapturedModel, plan: Plan, model: nn.Module) -> Signature:
        """model: an argument that its forward takes by position or by name may come either way."""
        degree = plan.data_parallel_size
        names = []
        for parameter in inspect.signature(model.forward).parameters.values():
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                break
            names.append(parameter.name)
        positional = tuple(names)
        values = {node.name: node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"}
        inputs = {}
        dims = named_dims([values[name] for name in captured.inputs])
        for (name, step_input), symbols in zip(captured.inputs.items(), dims, strict=True):
            shape, dim = list(values[name].shape), step_input.batch_dim
            if dim is not None:
                shape[dim] //= degree
            key = _by_name(step_input.key, positional)
            inputs[name] = _Input(key, step_input.key, tuple(shape), values[name].dtype, dim, symbols)
        return cls(inputs, plan.planned_rows, degree, positional)

    def bind(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Tensors of a call by placeholder name, on ``device``; some may be missing (``require``).

        Raises InvalidInput, before any communication, if the call does not fit the captured one. Values that are not
        tensors were fixed by capture.
        """
        given = self._given(args, kwargs, target)
        bound: dict[str, torch.Tensor] = {}
        sizes: dict[str, int] = {}
        for name, expected in self.inputs.items():
            value = given.pop(expected.key, None)
            if value is None:
                continue
            if not _fits(value, expected, sizes):
                problem = f"{expected.key} is {_tensor(tuple(value.shape), value.dtype)}"
                raise InvalidInput(self._mismatch(problem, args, kwargs, target))
            bound[name] = value if value.device == device else value.to(device, non_blocking=True)
        if given:
            raise InvalidInput(self._mismatch(f"{', '.join(given)}: not an input", args, kwargs, target))
        return bound

    @property
    def length(self) -> int:
        """Of the plan's rows, in tokens. Raises InvalidInput if no input is rows of tokens."""
        for given in self.inputs.values():
            if given.batch_dim == 0 and len(given.shape) == 2 and not given.dtype.is_floating_point:
                return given.shape[1]
        raise InvalidInput("no input of the model is rows of tokens, into which documents could be packed")

    @property
    def planned(self) -> GivenSizes:
        """The sizes that the plan has on every rank."""
        return self._sizes({name: expected.shape for name, expected in self.inputs.items()})

    def sizes(self, bound: Mapping[str, torch.Tensor]) -> GivenSizes:
        """The sizes of the tensors of a call; those of arguments that are not there are as in the plan."""
        planned = self.planned
        given = self._sizes({name: value.shape for name, value in bound.items()})
        return GivenSizes(
            planned.rows if given.rows is None else given.rows,
            {name: given.lengths.get(name, size) for name, size in planned.lengths.items()},
        )

    def _sizes(self, shapes: Mapping[str, Sequence[int]]) -> GivenSizes:
        found: dict[str, int] = {}
        for name, shape in shapes.items():
            found.update((symbol, shape[dim]) for dim, symbol in self.inputs[name].names.items())
        rows = found.pop(BATCH, None)
        return GivenSizes(rows, dict(sorted(found.items())))

    def absent(self, bound: Container[str]) -> frozenset[str]:
        """Keys, in the captured call, of the arguments of the model that are not in ``bound``, those of a call."""
        missing = (given for name, given in self.inputs.items() if name not in bound)
        return frozenset(given.given_as for given in missing if not given.key.startswith("target"))

    def require(
        self, names: Iterable[str], bound: Container[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any
    ) -> None:
        """Raise InvalidInput unless the tensors called ``names`` are in ``bound``, those of a call."""
        for name in names:
            if name not in bound:
                raise InvalidInput(self._mismatch(f"{self.inputs[name].key} is missing", args, kwargs, target))

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> dict[str, torch.Tensor]:
        """Tensors of a call by key, arguments by name where they have one."""
        if target is not None and not any(expected.key.startswith("target") for expected in self.inputs.values()):
            kwargs, target = {**kwargs, "target": target}, None
        found: dict[str, torch.Tensor] = {}
        for root, value in (("args", args), ("kwargs", dict(kwargs)), ("target", target)):
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                if isinstance(leaf, torch.Tensor):
                    found[_by_name(root + pytree.keystr(path), self.positional)] = leaf
        return found

    def _mismatch(self, problem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> str:
        expected = ", ".join(f"{i.key}: {_tensor(i.shape, i.dtype)}" for i in self.inputs.values())
        given = self._given(args, kwargs, target)
        got = ", ".join(f"{key}: {_tensor(tuple(value.shape), value.dtype)}" for key, value in given.items())
        rows = f"{self.global_size // self.data_parallel_size} of the {self.global_size} rows of the global batch"
        return (
            f"the arguments do not fit the captured program: {problem}.\n"
            f"  expected, on each data-parallel rank ({rows}): {expected}\n"
            f"  got: {got or 'no tensors'}\n"
            "  try: shard_batch(batch) takes this rank's rows of a global batch, of any number; another set of "
            "arguments needs another plan"
        )

    def shard(self, batch: Any, rank: int) -> Any:
        """Rows of data-parallel rank ``rank`` of every tensor in ``batch`` whose first dimension is the batch.

        Of rows that do not divide, the first ranks have one more; of fewer rows than ranks, the last have none.
        A tensor of the shape and dtype of an input that has no rows of the batch (edges of a graph) is left whole.
        """
        whole = {
            (step_input.shape, step_input.dtype) for step_input in self.inputs.values() if step_input.batch_dim is None
        }

        def rows(value: torch.Tensor) -> torch.Tensor:
            if value.dim() == 0 or (tuple(value.shape), value.dtype) in whole:
                return value
            if not value.shape[0]:
                raise InvalidInput(
                    f"a tensor of the batch is {_tensor(tuple(value.shape), value.dtype)}; expected the global batch, "
                    f"of at least one row.\n  try: {self.global_size} rows, as many as the plan is for"
                )
            return value.narrow(0, *own_rows(value.shape[0], rank, self.data_parallel_size))

        return pytree.tree_map_only(torch.Tensor, rows, batch)


def own_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first of the rows of a batch that a data-parallel rank has, and how many: the first ranks have one more where
    rows do not divide."""
    length, longer = divmod(rows, ranks)
    return rank * length + min(rank, longer), length + (rank < longer)


def _fits(value: torch.Tensor, expected: _Input, sizes: dict[str, int]) -> bool:
    """Whether a tensor is an input. sizes: of the symbols, noted for the inputs that follow."""
    if value.dtype != expected.dtype or value.dim() != len(expected.shape):
        return False
    for dim, (got, wanted) in enumerate(zip(value.shape, expected.shape, strict=True)):
        name = expected.names.get(dim)
        wanted = wanted if name is None else sizes.setdefault(name, got)
        if got != wanted or (not got and name != BATCH):
            return False
    return True


def _by_name(key: str, positional: tuple[str, ...]) -> str:
    """``args[0]`` as ``kwargs['x']``, where the model calls its first argument x."""
    found = re.match(r"args\[(\d+)\]", key)
    if found is None or int(found[1]) >= len(positional):
        return key
    return f"kwargs[{positional[int(found[1])]!r}]{key[found.end() :]}"


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
