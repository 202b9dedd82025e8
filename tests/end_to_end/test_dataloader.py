"""Training on ``pm.dataloader``, under one plan after the other, gives the losses of one process."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.ir.errors import InvalidInput
from autopar.runtime.data import Dataloader
from tests.harness import run_ranks

BATCH, WIDTH, ROWS = 8, 16, 42
PLANS: list[dict[str, int]] = [{"dp": 4}, {"dp": 2, "tp": 2}, {"tp": 4}, {"pp": 2, "dp": 2}]


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
        # Noise that has to be the same on ranks that share the row.
        return {"x": x + torch.rand(()), "target": x.flip(0)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x, target)


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _train(pm: Any, optimizer: torch.optim.Optimizer, loader: Any, steps: int) -> list[float]:
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            loss = pm.step(**batch) if isinstance(pm, autopar.ParallelModule) else pm(**batch)
            if not isinstance(pm, autopar.ParallelModule):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
    return losses


def _run(plan: dict[str, int], folder: str, resume: bool) -> list[float]:
    example = {"x": torch.zeros(BATCH, WIDTH), "target": torch.zeros(BATCH, WIDTH)}
    degrees = dict.fromkeys(("pp", "dp", "tp", "cp", "ep"), 1) | plan
    pm = autopar.parallelize(_net(), 4, example_inputs=example, **degrees)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.5)
    loader = pm.dataloader(Rows(), BATCH, seed=5)
    if resume:
        loader.load_state_dict(autopar.load(pm, optimizer, folder).data)
    losses = _train(pm, optimizer, loader, 4)
    autopar.save(pm, optimizer, folder, data=loader.state_dict())
    return losses


def _run_all(folder: str) -> list[list[float]]:
    return [_run(plan, folder, resume=number > 0) for number, plan in enumerate(PLANS)]


def test_losses_are_those_of_one_process(tmp_path: Any) -> None:
    torch.distributed.init_process_group("fake", store=_fake_store(), rank=0, world_size=1)
    try:
        net = _net()
        loader = Dataloader(Rows(), BATCH, rank=0, ranks=1, seed=5)
        expected = _train(net, torch.optim.SGD(net.parameters(), lr=0.5), loader, 4 * len(PLANS))
    finally:
        torch.distributed.destroy_process_group()
    for results in run_ranks(_run_all, 4, str(tmp_path / "run")):
        assert list(chain.from_iterable(results)) == pytest.approx(expected, rel=1e-5)


def _fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def _orders() -> tuple[list[float], str, str]:
    """Own rows, the same in another loader; and what a wrong batch size and unequal seeds say."""
    example = {"x": torch.zeros(BATCH, WIDTH), "target": torch.zeros(BATCH, WIDTH)}
    pm = autopar.parallelize(_net(), 2, example_inputs=example, pp=1, dp=2, tp=1, cp=1, ep=1)
    loader = pm.dataloader(Rows(), shuffle=False)
    for own, whole in zip(loader, DataLoader(Rows(), BATCH, drop_last=True), strict=True):
        assert torch.equal(own["target"], pm.shard_batch(whole)["target"])
    messages = []
    for arguments in ({"batch_size": 1}, {"seed": torch.distributed.get_rank()}):
        try:
            pm.dataloader(Rows(), **arguments)
        except InvalidInput as error:
            messages.append(str(error))
    return messages[0], messages[1]


def test_rows_are_those_of_shard_batch_and_mistakes_are_named() -> None:
    for size, seed in run_ranks(_orders, 2):
        assert (
            "batch_size is 1; expected samples of the global batch, at least one for each of 2 data-parallel ranks"
            in size
        )
        assert "ranks disagree on seed: 0 on rank 0, 1 on rank 1" in seed
