"""One rank's trouble is everyone's: the same error on every rank, with its number, and nobody waits."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import autopar
from autopar.ir.errors import AutoparError
from autopar.runtime.accord import Accord, WaitingWarning
from tests.harness import RankFailure, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)


class Broken:
    """Samples of which the second rank cannot read one."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if number == 3:
            raise OSError("the disk is gone")
        return {"x": torch.zeros(4), "y": torch.zeros(1)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """So many samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"x": torch.zeros(4), "y": torch.zeros(1)}] * self.count)


def without_gradients(pm: autopar.ParallelModule, rows: Any) -> None:
    with torch.no_grad():
        pm.step(*rows)


def said(call: Callable[[], Any]) -> str:
    """The error of a call on this rank."""
    try:
        call()
    except (AutoparError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def troubles(constraints: dict[str, Any], folder: str) -> dict[str, str]:
    """What each trouble of rank 1 is said to be here. The ranks go on together after each of them."""
    rank = dist.get_rank()
    other = rank == 1
    torch.manual_seed(rank)
    found = {}
    batch = torch.zeros(4, 4), torch.ones(4, 1)
    found["weights"] = said(lambda: autopar.parallelize(Net(), 2, example_inputs=batch, **constraints))
    torch.manual_seed(0)
    net = Net()
    net.second.bias.requires_grad_(not other)
    found["frozen"] = said(lambda: autopar.parallelize(net, 2, example_inputs=batch, **constraints))
    torch.manual_seed(0)
    net = Net()
    net.first.bias.requires_grad_(False)
    partly = autopar.parallelize(net, 2, example_inputs=batch, **constraints)
    dict(partly.named_parameters())["first.bias"].requires_grad_(other)
    found["unfrozen"] = said(lambda: partly.step(*partly.shard_batch(batch)))
    torch.manual_seed(0)
    net = Net()
    if other:
        net.first.weight.data[2, 3] += 1
    found["one weight"] = said(lambda: autopar.parallelize(net, 2, example_inputs=batch, **constraints))
    microbatches = {"num_microbatches": 2} if other else {}
    found["constraints"] = said(
        lambda: autopar.parallelize(Net(), 2, example_inputs=batch, **constraints, **microbatches)
    )
    found["ranks"] = said(lambda: autopar.parallelize(Net(), 3 if other else 2, example_inputs=batch, **constraints))
    torch.manual_seed(0)
    pm = autopar.parallelize(Net(), 2, example_inputs=batch, **constraints)
    rows = pm.shard_batch(batch)
    found["shape"] = said(lambda: pm.step(rows[0][:1] if other else rows[0], rows[1]))
    found["dtype"] = said(lambda: pm.step(rows[0].double() if other else rows[0], rows[1]))
    found["missing"] = said(lambda: pm.step(x=rows[0]) if other else pm.step(x=rows[0], y=rows[1]))
    found["rows"] = said(lambda: pm.step(*pm.shard_batch((torch.zeros(3, 4) if other else batch[0], batch[1]))))
    found["loader"] = said(lambda: [pm.step(**own) for own in pm.dataloader(Broken(), shuffle=False)])
    pm.train(not other)
    found["mode"] = said(lambda: pm.step(*rows))
    pm.train()
    found["call"] = said(lambda: pm.loss(*rows) if other else pm.step(*rows))
    found["gradients"] = said(lambda: without_gradients(pm, rows) if other else pm.step(*rows))
    found["clip"] = said(lambda: pm.step(*rows) if other else pm.clip_grad_norm_(1.0))
    found["state"] = said(lambda: pm.full_state_dict() if other else pm.step(*rows))
    found["save"] = said(lambda: autopar.save(pm, None, folder, step=int(other)))
    found["stream"] = said(lambda: [pm.step(**own) for own in pm.dataloader(Stream(5 if other else 12))])
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.2 if other else 0.1, momentum=0.9)
    pm.step(*rows)
    optimizer.step()
    found["lr"] = said(lambda: pm.step(*rows))
    del optimizer
    again = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.step(*rows)
    again.param_groups[0]["lr"] = 0.3 if other else 0.1
    again.step()
    found["schedule"] = said(lambda: pm.step(*rows))
    again.param_groups[0]["lr"] = 0.1
    again.step()
    if not other:
        again.zero_grad()
    found["kept"] = said(lambda: pm.step(*rows))
    again.zero_grad()
    found["nothing"] = said(lambda: pm.step(*rows))
    return found


def test_a_trouble_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    zero, one = run_ranks(troubles, 2, {"dp": 2, "zero": 1}, str(tmp_path / "checkpoint"))
    assert "the weights that rank 1 starts from are not those of rank 0" in zero["weights"] == one["weights"]
    assert "first.weight" in one["weights"]
    for name, words in {"shape": "float32[1, 4]", "dtype": "float64[2, 4]", "rows": "float32[2, 1]"}.items():
        assert words in one[name] and zero[name] == one[name].replace("InvalidInput: ", "InvalidInput: on rank 1: ")
    assert one["loader"] == "OSError: the disk is gone"
    assert zero["loader"] == "LaunchError: on rank 1: OSError: the disk is gone"
    expected = {
        "missing": "step(x), number 1", "mode": "number 1, in eval mode", "call": "loss(x, y)",
        "lr": "has lr=0.2 in place of lr=0.1", "schedule": "lr=0.3", "clip": "clip_grad_norm_(1.0)",
        "state": "full_state_dict()", "save": "step=1", "stream": "the end of the data of a dataloader, after 4",
        "kept": "no gradients are kept", "frozen": "the frozen parameters: 0", "one weight": "first.weight",
        "constraints": "dp, num_microbatches, zero",
    }  # fmt: skip
    for name, words in expected.items():
        assert zero[name] == one[name] and "rank 1" in zero[name] and words in zero[name], (name, zero[name])
    on_both = {
        "ranks": "the mesh has 3 ranks",
        "gradients": "step() is within torch.no_grad()",
        "unfrozen": "first.bias was frozen when the model was captured",
    }
    for name, words in on_both.items():
        assert words in zero[name] and "on rank 1: " in zero[name] and words in one[name]
    assert zero["nothing"] == one["nothing"] == "no error"


def leaves() -> str:
    torch.manual_seed(0)
    batch = torch.zeros(4, 4), torch.ones(4, 1)
    pm = autopar.parallelize(Net(), 2, example_inputs=batch, dp=2)
    pm.step(*pm.shard_batch(batch))
    if dist.get_rank() == 1:
        # What Python does with an exception that nobody catches.
        error = ValueError("a mistake in the user's own code")
        sys.excepthook(ValueError, error, None)
        os._exit(1)
    try:
        pm.step(*pm.shard_batch(batch))
    except AutoparError as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from None
    return "no error"


def test_a_rank_that_ends_is_named_with_its_reason() -> None:
    with pytest.raises(
        RankFailure, match="LaunchError: rank 1 has ended: ValueError: a mistake in the user's own code"
    ):
        run_ranks(leaves, 2)


def comes_late() -> list[str]:
    """What the first rank says while the other does something else."""
    accord = Accord(("call",), patience=timedelta(seconds=0.2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if dist.get_rank() == 1:
            time.sleep(1.5)
        accord.check({"call": "step(x), number 3"})
    return [str(warning.message) for warning in told if warning.category is WaitingWarning]


def test_a_rank_that_is_waited_for_is_named() -> None:
    (said, *_), _ = run_ranks(comes_late, 2)
    assert "rank 1 has not come to step(x), number 3" in said


def comes_to_its_end() -> str:
    torch.manual_seed(0)
    batch = torch.zeros(4, 4), torch.ones(4, 1)
    pm = autopar.parallelize(Net(), 2, example_inputs=batch, dp=2)
    pm.step(*pm.shard_batch(batch))
    if dist.get_rank() == 1:
        atexit._run_exitfuncs()
        os._exit(0)
    raise AssertionError(said(lambda: pm.step(*pm.shard_batch(batch))))


def test_a_rank_whose_program_is_over_is_named() -> None:
    with pytest.raises(RankFailure, match="LaunchError: rank 1 has ended: its program came to an end"):
        run_ranks(comes_to_its_end, 2)


def not_finite(folder: str) -> tuple[str, int]:
    """What saving says once a parameter of the second rank is infinite, and the step of the checkpoint that is left."""
    torch.manual_seed(0)
    pm = autopar.parallelize(Net(), 2, example_inputs=(torch.zeros(4, 4), torch.ones(4, 1)), dp=2, zero=3)
    autopar.save(pm, None, folder, step=1)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(pm.parameters()).to_local().fill_(float("inf"))
    text = said(lambda: autopar.save(pm, None, folder, step=2))
    return text, autopar.load(pm, None, folder).step


def test_parameters_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    for text, step in run_ranks(not_finite, 2, str(tmp_path / "checkpoint")):
        assert text.startswith("NotFinite: step 2: 1 parameters are not finite on rank 1, the first is first.weight")
        assert step == 1


def seconds_of_checks(count: int) -> float:
    accord = Accord(("call", "optimizer", "settings"))
    start = os.times().elapsed
    for number in range(count):
        accord.check({"call": f"step, number {number}", "optimizer": "SGD(lr=0.1)", "settings": None})
    return (os.times().elapsed - start) / count


@pytest.mark.slow
def test_a_check_takes_little() -> None:
    seconds = run_ranks(seconds_of_checks, 2, 1000)
    print(f"{max(seconds) * 1e6:.0f} us a check")
    assert max(seconds) < 0.02
