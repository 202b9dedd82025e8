"""Modules that are alike are traced a few times, and the captured graph is that of tracing them all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.ir.capture import repeated_modules
from autopar.ir.capture.capture import capture
from autopar.ir.capture.module_equality import groups_alike
from autopar.ir.errors import CaptureError
from autopar.ir.graph import CapturedModel
from autopar.passes.verify.well_formed import verify
from tests.ir.models import assert_same_training

DEPTH = 7
RUNS = count()


def note_run() -> None:
    """Count a run under a tracer. In an iterator: capture refuses models that count in numbers."""
    if get_proxy_mode() is not None:
        next(RUNS)


class Layer(nn.Module):
    """A residual layer that counts how often it is traced."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: Tensor, flag: bool = True) -> Tensor:
        note_run()
        return x + self.down(self.inner(self.up(self.norm(x)))) * scale

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Stack(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(make(index) for index in range(depth))
        self.taps = (3, 5)

    def forward(self, x: Tensor) -> Any:
        tapped = []
        x = x * self.scale
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale)
            x = x[0] if isinstance(x, tuple) else x
            if number in self.taps:
                tapped.append(x.sum())
        return (x.square().mean() + sum(tapped),)


def lines(captured: CapturedModel) -> list[tuple[str, ...]]:
    """All that a graph says. Constants by their values: those of modules that are alike may be one."""

    def shown(value: object) -> str:
        text = str(value)
        for name, constant in sorted(captured.constants.items(), reverse=True):
            text = text.replace(name, str(constant.tolist()))
        return text

    return [
        (
            node.name,
            str(node.target),
            shown(node.args),
            shown(node.kwargs),
            str(node.meta.get("path")),
            str(node.meta.get("source")),
            str(getattr(node.meta.get("val"), "shape", None)),
        )
        for node in captured.graph.nodes
        if node.name not in captured.constants
    ]


def assert_as_traced_whole(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how often a layer was run to capture it."""
    before = next(RUNS)
    found = capture(model, x)
    runs = next(RUNS) - before - 1
    verify(found)
    with monkeypatch.context() as patch:
        patch.setattr(repeated_modules, "_AT_LEAST", 10**9)
        whole = capture(model, x)
    assert lines(found) == lines(whole)
    assert found.buffers == whole.buffers
    assert found.fingerprint == whole.fingerprint
    return runs


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 8)


@pytest.mark.parametrize("depth", [4, DEPTH, 20])
def test_three_of_them_are_traced(depth: int, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what happens between them, the values that are tapped there, and a parameter that all read."""
    assert assert_as_traced_whole(Stack(depth=depth), x, monkeypatch) == 3


def test_kinds_take_turns(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Relu(Layer):
        def inner(self, x: Tensor) -> Tensor:
            return F.relu(x)

    model = Stack(lambda index: (Relu if index % 3 == 2 else Layer)(index), depth=12)
    assert assert_as_traced_whole(model, x, monkeypatch) == 6


def test_buffers_that_a_step_updates(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.batch = nn.BatchNorm1d(16)

        def inner(self, x: Tensor) -> Tensor:
            return self.batch(x.transpose(1, 2)).transpose(1, 2)

    assert assert_as_traced_whole(Stack(Normed), x, monkeypatch) == 3


def test_regions_without_gradient_inside(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Layer):
        def inner(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                gate = x.sigmoid()
            return x * gate

    assert assert_as_traced_whole(Stack(Stopped), x, monkeypatch) == 3


def test_writes_inside_and_to_results(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writing(Layer):
        def inner(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[..., 0] = 1.0
            return x.relu_()

    class Adding(Stack):
        def forward(self, x: Tensor) -> Any:
            x = x * self.scale
            for layer in self.layers:
                before, x = x, layer(x, self.scale)
                x += before
            return (x.square().mean(),)

    assert assert_as_traced_whole(Adding(Writing), x, monkeypatch) == 3


def test_results_of_several_kinds(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Several(Layer):
        def forward(self, x: Tensor, scale: Tensor, flag: bool = True) -> Any:
            return super().forward(x, scale), None, {"mean": x.mean(), "name": "layer"}

    class Using(Stack):
        def forward(self, x: Tensor) -> Any:
            means = []
            x = x * self.scale
            for layer in self.layers:
                x, _, more = layer(x, self.scale)
                means.append(more["mean"])
            return (x.square().mean() + torch.stack(means).sum(),)

    assert assert_as_traced_whole(Using(Several), x, monkeypatch) == 3


def test_a_number_that_is_not_used() -> None:
    (group,) = groups_alike(Stack(), at_least=4)
    assert [path for path, _ in group.members] == [f"layers.{index}" for index in range(DEPTH)]
    assert group.counts == {".index"}


# What only looks alike is found out, and traced whole.


@pytest.mark.parametrize("use", ["scale", "every", "table", "name"])
def test_a_number_that_is_used(use: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first two and the last do the same."""

    class Numbered(Layer):
        def inner(self, x: Tensor) -> Tensor:
            if use == "scale":
                return x / (self.index + 1)
            if use == "every":
                return x.relu() if self.index % 4 == 3 else x
            if use == "table":
                return x * [1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0][self.index]
            return x.relu() if str(self.index) == "4" else x

    assert assert_as_traced_whole(Stack(Numbered), x, monkeypatch) == 1 + DEPTH


@pytest.mark.filterwarnings("ignore::autopar.ir.capture.python_state.second_call.UnkeptStateWarning")
def test_a_value_handed_on_in_secret(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recording(Layer):
        seen: ClassVar[list[Tensor]] = []

        def inner(self, x: Tensor) -> Tensor:
            Recording.seen.append(x.mean())
            return x

    class Reading(Stack):
        def forward(self, x: Tensor) -> Any:
            Recording.seen.clear()
            (loss,) = super().forward(x)
            return (loss + torch.stack(Recording.seen).sum(),)

    assert assert_as_traced_whole(Reading(Recording), x, monkeypatch) == 3 + DEPTH


@pytest.mark.filterwarnings("ignore::autopar.ir.capture.python_state.second_call.UnkeptStateWarning")
def test_a_value_read_in_secret(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(Layer):
        given: ClassVar[list[Tensor]] = []

        def inner(self, x: Tensor) -> Tensor:
            return x * Reading.given[0]

    class Giving(Stack):
        def forward(self, x: Tensor) -> Any:
            Reading.given[:] = [x.mean()]
            return super().forward(x)

    assert assert_as_traced_whole(Giving(Reading), x, monkeypatch) == 3 + DEPTH


def test_an_argument_that_changes_between_calls(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its identity is the same for every call, and so are the ops of the first two and the last."""

    class Context:
        depth = 0

    class Asking(Layer):
        def forward(self, x: Tensor, scale: Tensor, context: Any = None) -> Tensor:
            y = super().forward(x, scale)
            return y.relu() if context.depth == 4 else y

    class Telling(Stack):
        def forward(self, x: Tensor) -> Any:
            context = Context()
            x = x * self.scale
            for context.depth, layer in enumerate(self.layers):
                x = layer(x, self.scale, context)
            return (x.square().mean(),)

    assert assert_as_traced_whole(Telling(Asking), x, monkeypatch) == DEPTH


def test_calls_that_are_counted(x: Tensor) -> None:
    """In an object that all modules hold: those that are not followed would not count."""

    class Counter:
        calls = 0

    def make(counter: Counter, index: int) -> nn.Module:
        layer = Counting(index)
        layer.counter = counter
        return layer

    class Counting(Layer):
        def inner(self, x: Tensor) -> Tensor:
            self.counter.calls += 1
            return x.relu() if self.counter.calls == 5 else x

    def counting() -> nn.Module:
        counter = Counter()
        return Stack(lambda index: make(counter, index))

    with pytest.raises(CaptureError, match=r"changes self.layers.0.counter.calls to 7"):
        capture(counting(), x)


def test_what_is_given_is_written_to(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writing(Layer):
        def forward(self, x: Tensor, scale: Tensor, flag: bool = True) -> Tensor:
            y = super().forward(x, scale)
            x.mul_(2.0)
            return y

    assert assert_as_traced_whole(Stack(Writing), x, monkeypatch) == 1 + DEPTH


def test_all_under_no_grad(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(Stack):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                x = x * self.scale
                for layer in self.layers:
                    x = layer(x, self.scale)
            return ((x * self.scale).mean(),)

    assert assert_as_traced_whole(Frozen(), x, monkeypatch) == 3 + DEPTH


@pytest.mark.parametrize("why", ["tied", "attribute", "shape"])
def test_what_does_not_look_alike(why: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(index: int) -> nn.Module:
        layer = Layer(index)
        if why == "attribute":
            layer.rate = 0.1 * index
        if why == "shape":
            layer.up, layer.down = nn.Linear(8, 16 + index), nn.Linear(16 + index, 8)
        return layer

    model = Stack(make)
    if why == "tied":
        for layer in model.layers:
            layer.up.weight = model.layers[0].up.weight
    assert assert_as_traced_whole(model, x, monkeypatch) == DEPTH


def test_a_layer_that_passes_on_what_it_is_given(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(Layer):
        def forward(self, x: Tensor, scale: Tensor, flag: bool = True) -> Tensor:
            note_run()
            return x

    class Adding(Stack):
        def forward(self, x: Tensor) -> Any:
            x = x * self.scale
            for layer in self.layers:
                y = layer(x, self.scale)
                y += 1.0
            return (x.square().mean(),)

    assert assert_as_traced_whole(Adding(Off), x, monkeypatch) == 2 + DEPTH - 1


def test_an_error_names_the_line_of_the_model(x: Tensor) -> None:
    class Failing(Layer):
        def inner(self, x: Tensor) -> Tensor:
            return x.reshape(7, 11)

    with pytest.raises(CaptureError, match=r"test_repetition.py:\d+ in inner"):
        capture(Stack(Failing), x)


@pytest.mark.parametrize("how", ["moves", "replaces", "hands out"])
def test_what_alike_modules_write_to_themselves(how: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stateful(Layer):
        mean: Tensor
        steps: Tensor

        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.register_buffer("mean", torch.full((8,), float(index)))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor, scale: Tensor, flag: bool = True) -> Any:
            y = super().forward(x, scale)
            with torch.no_grad():
                if how == "replaces":
                    self.mean = 0.9 * self.mean + 0.1 * y.mean((0, 1))
                else:
                    self.mean[:4].mul_(0.9).add_(y.mean((0, 1))[:4], alpha=0.1)
            self.steps += 1
            return (y - self.mean.tanh() / self.steps, self.mean) if how == "hands out" else y - self.mean.tanh()

    class Handing(Stack):
        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x, mean = layer(x, self.scale)
                mean.add_(1.0)
            return (x.square().mean(),)

    model = (Handing if how == "hands out" else Stack)(Stateful)
    runs = assert_as_traced_whole(model, x, monkeypatch)
    assert runs == (3 if how == "moves" else 1 + DEPTH)

    def first(output: Any, _: Tensor) -> Tensor:
        loss: Tensor = output[0]
        return loss

    captured = capture(model, x, loss_fn=first, example_target=x)
    assert_same_training(captured, model, (x,), loss_fn=first, target=x)
