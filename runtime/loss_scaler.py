"""Dynamic loss scaling, for float16: small gradients do not underflow, and steps whose gradients overflow are skipped.

    scaler = autopar.LossScaler(pm)
    loss = pm.step(...)               # backward of scale * loss; the gradients it leaves are unscaled
    pm.clip_grad_norm_(1.0)
    scaler.step(optimizer)            # skipped on all ranks if a gradient of any was not finite

As in torch.amp.GradScaler, the scale is halved after an overflow and doubled after a number of steps without. It is
a power of two, so that scaling changes no digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autopar.ir.errors import InvalidInput
from autopar.ir.primitives.read_parameter import local_of
from autopar.runtime.torch_private import scale_all, unscale_all


class Scaled(Protocol):
    """The module whose loss a scaler scales: a ``ParallelModule``."""

    def attach_scaler(self, scaler: LossScaler) -> None:
        """Have ``scaler`` scale the loss of every step."""
        ...


class LossScaler:
    """Scales the loss of ``pm``; the same on all ranks."""

    def __init__(
        self,
        pm: Scaled,
        *,
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        """growth_interval: steps without overflow before the scale grows."""
        if scale <= 0 or growth_factor < 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise InvalidInput(
                f"loss scaling: scale {scale}, growth_factor {growth_factor}, backoff_factor {backoff_factor}, "
                f"growth_interval {growth_interval}\n"
                "  expected: a scale above 0, growth of at least 1, backoff between 0 and 1, an interval of at least 1"
            )
        self.scale = scale
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._good_steps = 0
        self._overflow: Tensor | None = None
        pm.attach_scaler(self)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``scale * loss``, for a loss of one's own on a plain forward: ``scaler.scale_loss(loss).backward()``."""
        return loss * self.scale

    def before_backward(self, gradients: Iterable[Tensor]) -> None:
        """Scale the gradients of earlier calls, which the coming ones are added to."""
        local = list(map(local_of, gradients))
        if local:
            scale_all(local, self.scale)

    def after_backward(self, gradients: Iterable[Tensor], device: torch.device) -> None:
        """Unscale all gradients, which are on ``device``, and note whether one is not finite."""
        if self._overflow is None:
            self._overflow = torch.zeros((), dtype=torch.float32, device=device)
        inverse = torch.full((), 1.0 / self.scale, dtype=torch.float32, device=device)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in map(local_of, gradients):
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for some in by_dtype.values():
            unscale_all(some, self._overflow, inverse)

    def step(self, optimizer: Optimizer | Sequence[Optimizer]) -> bool:
        """``optimizer.step()``, unless a gradient of any rank was not finite; then the scale for the next step.

        Returns whether the step was made, the same on all ranks. All ranks call together.
        """
        if self._overflow is None:
            raise InvalidInput("loss scaling: there are no gradients.\n  try: pm.step(...) before scaler.step(...)")
        overflow, self._overflow = self._overflow, None
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow.item():
            self.scale *= self._backoff
            self._good_steps = 0
            return False
        for one in optimizer if isinstance(optimizer, Sequence) else (optimizer,):
            one.step()
        self._good_steps += 1
        if self._good_steps == self._interval:
            self.scale *= self._growth
            self._good_steps = 0
        return True

    def leave_out(self) -> None:
        """In place of ``step``, where the gradients are dropped for another reason: the scale stays as it is."""
        self._overflow = None

    def state_dict(self) -> dict[str, Any]:
        """Scale and number of steps since it last changed."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.scale, self._good_steps = state_dict["scale"], state_dict["good_steps"]
