from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError
from tests.ir.models import assert_same_training

SHARED = torch.ones(8)


class Base(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.linspace(-1, 1, 8))
        self.scratch = torch.zeros(8)


class ClampsAParameter(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-1, 1)  # the write
        return self.linear(x).square().mean()


class Renormalises(Base):
    def forward(self, x: Tensor) -> Tensor:
        indices = (x > 0).long()
        return F.embedding(indices, self.linear.weight, max_norm=1.0).square().mean()  # the write


class WritesToAnAttribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.scratch.add_(1)  # the write
        return (self.linear(x) * self.scratch).square().mean()


class WritesToAGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        SHARED.mul_(0.9)  # the write
        return (self.linear(x) * SHARED).square().mean()


class Detaches(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).detach().square().mean()


class CountsOnly(Base):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).argmax(-1) == 3).float().mean()


@pytest.mark.parametrize(
    ("model", "what", "line"),
    [
        (ClampsAParameter, "forward writes to the parameter 'linear.weight'", "# the write"),
        (Renormalises, "forward writes to the parameter 'linear.weight'", "# the write"),
        (WritesToAnAttribute, "neither a buffer nor a parameter", "# the write"),
        (WritesToAGlobal, "neither a buffer nor a parameter", "# the write"),
        (Detaches, "does not depend on any parameter", "in forward"),
        (CountsOnly, "does not depend on any parameter", "in forward"),
    ],
)
def test_what_cannot_be_trained_as_it_is_is_refused(model: type[nn.Module], what: str, line: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model(), torch.randn(4, 8))
    assert what in str(caught.value)
    assert line in str(caught.value)


class WritesUnderNoGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.average[2:4].zero_()
        return (h - self.average).square().mean()


def test_a_write_in_a_region_without_gradients_is_one_outside_of_it() -> None:
    model, x = WritesUnderNoGrad(), torch.randn(4, 8)
    captured = capture(model, x)
    assert [buffer.updated_by is not None for buffer in captured.buffers.values()] == [True]
    assert_same_training(captured, model, (x,))


class Reassigns(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return (h - self.average).square().mean()


class SetsData(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.average.data = 0.9 * self.average.data + 0.1 * h.data.mean(0)
        return (h - self.average).square().mean()


class WritesOut(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(self.average, 0.5, out=self.average)
        return (self.linear(x) * self.average).square().mean()


class WritesSeveral(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(8, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        torch.max(x, 0, out=(self.average, self.places))
        return (self.linear(x) * self.average).square().mean()


class WritesChunks(Base):
    def forward(self, x: Tensor) -> Tensor:
        first, last = self.average.chunk(2)
        first.add_(1)
        last.unbind(0)[1].zero_()
        with torch.no_grad():
            square = self.average.view(2, 4)
        square.t().mul_(0.5)
        return (self.linear(x) * self.average).square().mean()


class KeepsInstanceStatistics(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.linear(x).view(-1, 4, 2)).view(-1, 8) * self.average).square().mean()


class KeepsAQueue(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(16, 8))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        loss = F.cross_entropy(h @ self.queue.clone().t(), torch.zeros(len(x), dtype=torch.long))
        with torch.no_grad():
            self.queue[(self.pointer + torch.arange(len(x))) % 16] = h
            self.pointer[0] = (self.pointer[0] + len(x)) % 16
        return loss


class NormalisesSpectrally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
        self.down = nn.utils.spectral_norm(nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


# The weight that the older spectral norm leaves in an attribute is made anew in every call.
@pytest.mark.filterwarnings("ignore::autopar.ir.capture.python_state.second_call.UnkeptStateWarning")
@pytest.mark.parametrize(
    "kind",
    [
        Reassigns,
        SetsData,
        WritesOut,
        WritesSeveral,
        WritesChunks,
        KeepsInstanceStatistics,
        KeepsAQueue,
        NormalisesSpectrally,
    ],
)
def test_what_forward_writes_is_written(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    assert_same_training(capture(model, x), model, (x,))


class MakesWhatItIsAskedFor(OrderedDict[str, type[nn.Module]]):
    def __getitem__(self, key: str) -> nn.Module:  # type: ignore[override]
        return super().__getitem__(key)(4, 4)


KINDS = MakesWhatItIsAskedFor(gated=nn.Linear, plain=nn.Bilinear)


class ReadsATable(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * len(KINDS)


def test_a_table_that_makes_what_it_is_asked_for_is_not_asked() -> None:
    assert capture(ReadsATable(), torch.randn(4, 8)).has_loss


class Shares(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_buffer("average", self.average)

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average + 1
        return (self.linear(x) * self.linear.average).square().mean()


def test_a_buffer_of_two_names_is_not_replaced_under_one() -> None:
    with pytest.raises(CaptureError, match=r"replaces the buffer average, which is also linear.average"):
        capture(Shares(), torch.randn(4, 8))


class NormInACheckpoint(nn.Module):
    def __init__(self, norm: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), norm)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x * self.body[0].bias, use_reentrant=self.reentrant).square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_buffer_that_a_checkpoint_would_write_twice_is_refused(reentrant: bool) -> None:
    with pytest.raises(
        CaptureError, match=r"writes the buffer body.1.num_batches_tracked inside of(?s:.*)return check"
    ):
        capture(NormInACheckpoint(nn.BatchNorm1d(8), reentrant=reentrant), torch.randn(4, 8))
    capture(NormInACheckpoint(nn.LayerNorm(8), reentrant=reentrant), torch.randn(4, 8))
    evaluated = NormInACheckpoint(nn.BatchNorm1d(8), reentrant=reentrant).eval()
    capture(evaluated, torch.randn(4, 8), training=False)
