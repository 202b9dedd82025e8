"""A pipeline stage on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.program import StageProgram
from autopar.runtime.gradients import GradientReducer
from autopar.runtime.stage_module import StageModule
from autopar.runtime.zero import ZeroEngine


@dataclass(slots=True)
class LocalStage:
    """A stage's program and module, and what sums its gradients: told before each backward whether it is the last."""

    program: StageProgram
    module: StageModule
    reducer: GradientReducer
    zero: ZeroEngine | None = None

    def begin(self, variant: str) -> None:
        """A call of a program of the stage begins. All ranks of the stage together."""
        self.module.select(variant)
        self.module.updates = {}
        if self.zero is not None:
            self.zero.begin()

    def before_backward(self, last: bool) -> None:
        """A whole backward of one microbatch follows."""
        if self.zero is not None:
            self.zero.before_backward(last)
        if last:
            self.reducer.arm(self.program.stage)

    def reshard(self) -> None:
        """Put sharded parameters in place; also where the last backward would follow, but nothing has a gradient."""
        if self.zero is not None:
            self.zero.reshard()

    def before_inputs(self) -> None:
        """The B pass of a split backward follows, which delays most weight gradients."""
        if self.zero is not None:
            self.zero.before_inputs()

    def before_weights(self, last: bool) -> None:
        """The W pass of a split backward follows. Of a stage that sends no gradient back it is the whole backward."""
        if self.zero is not None and any(spec.has_gradient for spec in self.program.received):
            self.zero.before_weights()
        if last:
            self.reducer.arm(self.program.stage)

    def after_weights(self, last: bool) -> None:
        """The W pass of a split backward has run."""
        if self.zero is not None:
            self.zero.after_weights(last)
