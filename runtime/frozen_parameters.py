"""Parameters that were frozen when a model was captured stay so: no program computes a gradient of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopar.ir.errors import InvalidInput
from autopar.ir.program import ParameterLayout


class FrozenParameters:
    """Frozen parameters of one rank."""

    def __init__(
        self, parameters: Callable[[], Mapping[str, torch.Tensor]], layouts: Mapping[str, ParameterLayout]
    ) -> None:
        """parameters: gives those of the rank by name. layouts: of the same, as they were captured."""
        self._parameters, self._layouts = parameters, layouts
        self._frozen: dict[str, torch.Tensor] | None = None

    def failure(self) -> InvalidInput | None:
        """The error for one that requires a gradient by now."""
        if self._frozen is None:
            here, layouts = self._parameters(), self._layouts
            self._frozen = {name: here[name] for name in here if not layouts[name].parameter.requires_grad}
        for name, value in self._frozen.items():
            if value.requires_grad:
                return InvalidInput(
                    f"{name} was frozen when the model was captured, so that it has no gradient; now it requires one.\n"
                    "  try: requires_grad_(True) before parallelize; what is trainable then can be frozen afterwards"
                )
        return None
