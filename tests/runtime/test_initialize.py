"""Parameters of meta models get values from the modules they belong to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.errors import InvalidInput
from autopar.runtime.parameters import initialize


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = Scale()


class Hooked(Net):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scale):
            nn.init.ones_(module.weight)


def _values(model: nn.Module, names: list[str], seed: int = 0) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    initialize(model, names, lambda name, value: found.update({name: value.detach()}), seed)
    return found


def test_values_depend_on_seed_and_module_alone() -> None:
    with torch.device("meta"):
        model = Hooked()
    everything = list(model.state_dict())
    first = _values(model, everything)
    assert set(first) == set(everything)
    assert not torch.equal(first["first.weight"], first["second.weight"])
    assert first["first.weight"].abs().max() <= 0.5
    assert first["norm.running_var"].tolist() == [1.0] * 4
    assert first["norm.num_batches_tracked"].item() == 0
    assert first["scale.weight"].tolist() == [1.0] * 4
    # A stage that holds one module gets the same values.
    torch.testing.assert_close(_values(model, ["second.weight"])["second.weight"], first["second.weight"])
    assert not torch.equal(_values(model, everything, seed=1)["first.weight"], first["first.weight"])
    assert all(p.is_meta for p in model.parameters())


def test_modules_that_cannot_initialise_are_named() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(InvalidInput, match=r"scale.weight \(Scale\)"):
        _values(model, list(model.state_dict()))
