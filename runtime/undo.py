"""What a forward and backward change besides gradients, so that a step can be made as if it had not been."""

from __future__ import annotations

from autopar.runtime.engine import Engine


class BeforeStep:
    """The buffers and histories of maxima of this rank as they are now. Random numbers stay those of the step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A step puts new tensors in the place of buffers, and writes histories.
        self._buffers = {name: engine.tensor(name) for name in engine.buffers}
        self._histories = {name: history.clone() for name, history in engine.histories.tensors.items()}

    def put_back(self) -> None:
        """Give them the values that they had."""
        for stage in self._engine.local:
            for name, value in self._buffers.items():
                if stage.module.has(name):
                    stage.module.slot(name).set(value)
        for name, history in self._engine.histories.tensors.items():
            history.copy_(self._histories[name])
