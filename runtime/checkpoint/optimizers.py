"""The state of optimisers by parameter name, so that it does not depend on how a plan spreads parameters.

    tensors     layers.3.up.weight -> {"step": (), "exp_avg": a DTensor placed as the parameter is, ...}
    values      layers.3.up.weight -> whatever else the optimiser keeps (a step counter that is a number)
    settings    layers.3.up.weight -> the hyperparameters of its group: {"lr": 0.001, "betas": (0.9, 0.95), ...}

A rank has the parameters of its pipeline stage; together the ranks have all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.ir.errors import CheckpointError, InvalidInput

ByName = dict[str, dict[str, Any]]

# How an optimiser computes, not what: these stay as the optimiser at hand has them.
_IMPLEMENTATION = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class OptimizerState:
    """The state of one or several optimisers over parameters that have names."""

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises InvalidInput if an optimiser has a parameter that is not among ``parameters``, or two share one."""
        self._optimizers = optimizers
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise InvalidInput(
                "LBFGS keeps one history of all parameters together, which cannot be spread over ranks.\n"
                "  try: an optimiser that works parameter by parameter"
            )
        known = {id(parameter): name for name, parameter in parameters.items()}
        self._place: dict[str, tuple[Optimizer, dict[str, Any], nn.Parameter]] = {}
        for optimizer, group, parameter in self._members():
            name = known.get(id(parameter))
            if name is None and not parameter.numel():
                continue  # what ``ParallelModule.parameters`` has where nothing trains
            if name is None or name in self._place:
                raise InvalidInput(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that "
                    f"{'is not one of the parallel module' if name is None else f'another optimiser has too: {name}'}."
                    "\n  try: an optimiser over pm.parameters()"
                )
            self._place[name] = (optimizer, group, parameter)

    def _members(self) -> Iterator[tuple[Optimizer, dict[str, Any], nn.Parameter]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, group, parameter

    @property
    def names(self) -> list[str]:
        """Names of the parameters that optimisers hold."""
        return list(self._place)

    def tensors(self) -> ByName:
        """State tensors, by parameter name and key."""
        return self.both()[0]

    def values(self) -> ByName:
        """State that is no tensor, by parameter name and key."""
        return self.both()[1]

    def both(self) -> tuple[ByName, ByName]:
        """``tensors`` and ``values``."""
        tensors: ByName = {}
        values: ByName = {}
        for name, (optimizer, _, parameter) in self._place.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                (tensors if isinstance(value, torch.Tensor) else values).setdefault(name, {})[key] = value
        return tensors, values

    def settings(self) -> ByName:
        """Hyperparameters, by parameter name and key."""
        of_groups: dict[int, dict[str, Any]] = {}
        for _, group, _ in self._place.values():
            if id(group) not in of_groups:
                of_groups[id(group)] = {
                    key: value.item() if isinstance(value, torch.Tensor) else value
                    for key, value in group.items()
                    if key not in _IMPLEMENTATION
                }
        return {name: of_groups[id(group)] for name, (_, group, _) in self._place.items()}

    def check_settings(self, settings: ByName) -> None:
        """Raise CheckpointError unless each group's parameters had the same hyperparameters."""
        missing = [name for name in self._place if name not in settings]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no optimiser state of {_some(missing)}.\n"
                "  try: an optimiser over the same parameters, or load(pm, None, path) for the parameters alone"
            )
        for _, names in self._groups():
            saved = settings[names[0]]
            other = next((name for name in names if settings[name] != saved), None)
            if other is not None:
                keys = [key for key in saved if settings[other].get(key) != saved[key]]
                raise CheckpointError(
                    f"{names[0]} and {other} are in one parameter group, but had different {', '.join(keys)} when "
                    "they were saved.\n  try: parameter groups as they were when saving"
                )

    def load_settings(self, settings: ByName) -> None:
        """Give each group the hyperparameters that its parameters had, which ``check_settings`` has checked."""
        for group, names in self._groups():
            for key, value in settings[names[0]].items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def _groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Each group, with the names of its parameters."""
        by_group: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for name, (_, group, _) in self._place.items():
            by_group.setdefault(id(group), (group, []))[1].append(name)
        return list(by_group.values())

    def undo(self) -> Callable[[], None]:
        """What puts hyperparameters and state back as they are now, unless tensors of the state are overwritten."""
        groups = [(group, _copied(group)) for optimizer in self._optimizers for group in optimizer.param_groups]
        states = [
            (optimizer, parameter, dict(optimizer.state[parameter]) if parameter in optimizer.state else None)
            for optimizer, _, parameter in self._place.values()
        ]

        def put_back() -> None:
            for group, before in groups:
                for key in group.keys() - before.keys() - {"params"}:
                    del group[key]
                for key, value in before.items():
                    if isinstance(value, torch.Tensor):
                        group[key].copy_(value)  # a learning rate that others may hold too
                    else:
                        group[key] = value
            for optimizer, parameter, state in states:
                optimizer.state.pop(parameter, None)
                if state is not None:
                    optimizer.state[parameter] = state

        return put_back

    def create(self, portions: Iterable[Sequence[str]] | None = None) -> None:
        """Make the state that a first step makes, for parameters that have none yet.

        portions: names of all parameters, of which no more than one portion has a gradient at a time; by default all
        have one. The gradients stay; parameters may change, so load them later.
        """
        gradients = {parameter: parameter.grad for _, _, parameter in self._place.values()}
        for parameter in gradients:
            parameter.grad = None
        rates = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                rates.append((group, rate))
                if rate is not None:
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for names in (self.names,) if portions is None else portions:
            own = [self._place[name] for name in names if name in self._place]
            for optimizer, _, parameter in own:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    parameter.grad = torch.zeros_like(parameter)
            for optimizer in self._optimizers:
                optimizer.step()
            for _, _, parameter in own:
                parameter.grad = None
        for group, rate in rates:
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def adopt(self, tensors: Mapping[str, set[str]], values: ByName) -> dict[str, dict[str, torch.Tensor]]:
        """Keep the created state that the checkpoint has, and take ``values``; returns the tensors to fill.

        tensors: names of the saved tensors of each parameter. Raises CheckpointError if they are others than those
        that the optimiser keeps.
        """
        wanted: dict[str, dict[str, torch.Tensor]] = {}
        for name, (optimizer, _, parameter) in self._place.items():
            saved = tensors.get(name, set()) | set(values.get(name, {}))
            state = optimizer.state.get(parameter, {})
            if not saved:
                # It had had no gradient yet.
                optimizer.state.pop(parameter, None)
                continue
            if saved != set(state):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {sorted(state) or 'nothing'} of {name}; the checkpoint has "
                    f"{sorted(saved)}.\n  try: the kind of optimiser that was saved"
                )
            state.update(values.get(name, {}))
            wanted[name] = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        return wanted


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, tensors as copies."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
