"""What forward changes in Python is the same after every call, or is refused with its line."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
from contextvars import ContextVar
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.capture.python_state.second_call import UnkeptStateWarning
from autopar.ir.errors import CaptureError

CALLS = 0
DEPTH: ContextVar[int] = ContextVar("depth", default=0)
CHANCE = random.Random(0)
LOG: list[int] = []


class Base(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))


class CountsInAnAttribute(Base):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # changed
        return self.linear(x).square().mean() / self.count


class CountsInAGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1  # changed
        return self.linear(x).square().mean() / CALLS


class CountsInItsClass(Base):
    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsInItsClass.calls += 1  # changed
        return self.linear(x).square().mean() * (2 if CountsInItsClass.calls > 1000 else 1)


def counts_in_a_closure() -> nn.Module:
    calls = 0

    class Counting(Base):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1  # changed
            return self.linear(x).square().mean() * [1, 2][calls // 1000]

    return Counting()


class Iterates(Base):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * next(self.numbers)  # changed


class Draws(Base):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:  # changed
            x = x.relu()
        return self.linear(x).square().mean()


class DrawsFromItsOwn(Base):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * self.chance.random()  # changed


class DrawsFromAGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * CHANCE.random()  # changed


class CountsInAContext(Base):
    def forward(self, x: Tensor) -> Tensor:
        DEPTH.set(DEPTH.get() + 1)  # changed
        return self.linear(x).square().mean() * DEPTH.get()


class InitialisesOnce(Base):
    done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.done = True  # changed
            x = x.relu()
        return self.linear(x).square().mean()


class StartsWithNone(Base):
    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.mean = h.detach().mean(0) if self.mean is None else self.mean.lerp(h.detach().mean(0), 0.1)  # changed
        return (h - self.mean).square().mean()


class KeepsADict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"mean": torch.zeros(8)}

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.kept["mean"] = self.kept["mean"].lerp(h.detach().mean(0), 0.1)  # changed
        return (h - self.kept["mean"]).square().mean()


class Appends(Base):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.history.append(h.detach())  # changed
        return h.square().mean() + self.history[0].mean()


class AppendsToAGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        LOG.append(1)  # changed
        return self.linear(x).square().mean() * min(len(LOG), 1)


class GrowsABuffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.average = torch.cat([self.average, self.average])  # changed
        return (self.linear(x) * self.average[:8]).square().mean()


class ReplacesAParameter(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.bias = nn.Parameter(self.linear.bias * 0.5)  # changed
        return self.linear(x).square().mean()


class SwitchesModes(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.linear(x), 0.5, self.training)
        self.train(False)  # changed
        return h.square().mean()


class SwapsTensors(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.ones(8), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.two = self.two, self.one  # changed
        return (self.linear(x) * self.one).square().mean()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (CountsInAnAttribute, "self.count"),
        (CountsInAGlobal, "CALLS from 0 to 1"),
        (CountsInItsClass, "CountsInItsClass.calls from 0 to 1"),
        (counts_in_a_closure, "calls from 0 to 1"),
        (Iterates, "self.numbers"),
        (Draws, "random"),
        (DrawsFromItsOwn, "self.chance"),
        (DrawsFromAGlobal, "CHANCE"),
        (CountsInAContext, "DEPTH"),
        (InitialisesOnce, "self.done to True"),
        (StartsWithNone, "self.mean"),
        (KeepsADict, "self.kept['mean']"),
        (Appends, "self.history[1]"),
        (AppendsToAGlobal, "LOG[1]"),
        (GrowsABuffer, "the buffer self.average"),
        (ReplacesAParameter, "the parameter self.linear.bias"),
        (SwitchesModes, "self.training from True to False"),
        (SwapsTensors, "self.one"),
    ],
)
def test_what_the_next_call_would_see_is_refused_with_its_line(make: type[nn.Module], name: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(make(), torch.randn(4, 8))
    assert name in str(caught.value)
    assert "# changed" in str(caught.value)
    assert (CALLS, LOG, CountsInItsClass.calls) == (0, [], 0), "capture leaves no trace in the user's state"


class RemembersANumber(Base):
    @functools.lru_cache  # noqa: B019  # the model is the test's
    def noise(self) -> Tensor:
        return torch.rand(8)  # changed

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.noise()).square().mean()


def test_what_a_cache_keeps_of_chance_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="# changed"):
        capture(RemembersANumber(), torch.randn(4, 8))


@functools.lru_cache
def _is_available(name: str = "", number: int = 0) -> bool:
    return name != ""


@functools.lru_cache(maxsize=None)  # noqa: UP033  # the form that keeps all
def _table(size: int) -> Tensor:
    return torch.zeros(size)


class AsksOnce(Base):
    def forward(self, x: Tensor) -> Tensor:
        if not _is_available() and not _is_available("", 1):
            return self.linear(x).square().mean()
        return x.sum()


class MakesOnce(Base):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + _table(8)).square().mean()


@pytest.mark.parametrize(("make", "remembers"), [(AsksOnce, False), (MakesOnce, True)])
def test_plain_data_that_is_remembered_needs_no_second_call(
    make: type[nn.Module], remembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    module = importlib.import_module("autopar.ir.capture.capture")
    monkeypatch.setattr(module, "check_second_call", lambda title, *others: called.append(title))
    for function in (_is_available, _table):
        function.cache_clear()
    capture(make(), torch.randn(4, 8))
    assert bool(called) == remembers


class Counts(Base):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        loss = self.linear(x).square().mean()
        self.log.append(loss.detach())
        LOG.append(len(x))
        return loss


def test_what_is_only_counted_or_logged_is_left_out() -> None:
    with pytest.warns(UnkeptStateWarning, match=r"self.calls, self.log\[1\], LOG\[1\]"):
        capture(Counts(), torch.randn(4, 8))
    assert not LOG


class MakesTables(Base):
    positions: Tensor | None = None

    @functools.lru_cache  # noqa: B019  # the model is the test's
    def scales(self, count: int) -> Tensor:
        return torch.arange(count) * torch.tensor([0.5])

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            positions = torch.zeros(8)
            positions[::2] = torch.arange(4).cos()
            self.positions = positions * (self.average + 1)
        return (self.linear(x) * self.positions * self.scales(8)).square().mean()


class MakesTablesOfWhatMoves(MakesTables):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = super().forward(x)
        self.average.add_(1.0)
        return loss


@pytest.mark.filterwarnings("ignore::autopar.ir.capture.python_state.second_call.UnkeptStateWarning")
def test_tables_that_the_first_call_makes_are_made_in_every_call() -> None:
    model = MakesTables()
    capture(model, torch.randn(4, 8))
    assert model.positions is None
    model(torch.randn(4, 8))  # no tensor of the trace is left in a cache
    with pytest.raises(CaptureError, match=r"self.positions"):
        capture(MakesTablesOfWhatMoves(), torch.randn(4, 8))


class Stashes(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.length = len(x)
        self.hidden = self.linear(x)
        self.shapes = [self.hidden.shape]
        return self.hidden.square().mean()


def test_what_every_call_sets_anew_is_no_state() -> None:
    model = Stashes()
    with pytest.warns(UnkeptStateWarning, match=r"sets self.hidden"):
        capture(model, torch.randn(4, 8))
    assert not hasattr(model, "hidden")


def test_what_the_first_call_alone_changes_can_be_changed_before() -> None:
    model = InitialisesOnce()
    with pytest.raises(CaptureError, match="try: a call of the model on one batch before this"):
        capture(model, torch.randn(4, 8))
    model(torch.randn(4, 8))
    capture(model, torch.randn(4, 8))
    with pytest.raises(CaptureError, match="try: a buffer that is changed by tensor ops"):
        capture(CountsInAnAttribute(), torch.randn(4, 8))


class ChecksWhatItIsGiven(Base):
    """Leaves a tensor behind, so that a second call is made, in which the check passes too."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("out of range")
        self.hidden = self.linear(x)
        return self.hidden.square().mean()


def test_a_check_of_values_passes_in_the_second_call_too() -> None:
    with pytest.warns(UnkeptStateWarning):
        capture(ChecksWhatItIsGiven(), torch.randn(4, 8))


class OfAMissingPackage(type):
    def __getattr__(cls, name: str) -> None:
        raise ImportError(f"{cls.__name__} requires a package that is not there")


class Absent(metaclass=OfAMissingPackage):
    """As libraries export it in the place of what they lack."""

    __module__ = "torch"


class BesideWhatIsMissing(Base):
    kinds: ClassVar[list[type]] = [Absent]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_a_class_that_raises_at_every_attribute_is_passed_by() -> None:
    capture(BesideWhatIsMissing(), torch.randn(4, 8))
