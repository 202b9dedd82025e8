"""Checkpoints: what is saved under one plan goes on under any other, and a crash leaves the one before."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.errors import AutoparError
from autopar.runtime.checkpoint.loading import Progress
from autopar.runtime.checkpoint.manifest import MANIFEST
from autopar.runtime.checkpoint.writer import AtomicWriter
from tests.harness import RankFailure, run_ranks

ROWS, SEQ, WIDTH, VOCAB = 8, 4, 12, 18


class Net(nn.Module):
    """Tied embedding, dropout, a counter; sizes that four ranks divide unevenly."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.ups = nn.ModuleList(nn.Linear(width, 20) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(20, width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.dropout = dropout

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
            if self.dropout:
                x = F.dropout(x, self.dropout)
        self.seen.add_(1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def _batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class Run:
    """A model under a plan, with an optimiser of two groups and a scheduler."""

    def __init__(
        self, constraints: dict[str, Any], seed: int = 0, optimizer: type[Any] = torch.optim.AdamW, **options: Any
    ):
        net = _net(seed, **options)
        self.pm = autopar.parallelize(net, dist.get_world_size(), example_inputs=_batch(0), **constraints)
        matrices = [p for p in self.pm.parameters() if p.dim() > 1]
        vectors = [p for p in self.pm.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
        self.optimizer = optimizer(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        self.step = 0

    def train(self, until: int) -> list[float]:
        losses = []
        while self.step < until:
            self.step += 1
            losses.append(float(self.pm.step(**self.pm.shard_batch(_batch(self.step)))))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, path: str, **options: Any) -> Any:
        return autopar.save(
            self.pm, self.optimizer, path, scheduler=self.scheduler, step=self.step, data={"row": self.step}, **options
        )

    def load(self, path: str) -> Any:
        progress = autopar.load(self.pm, self.optimizer, path, scheduler=self.scheduler)
        self.step = progress.step
        return progress


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 pp2": (4, {"dp": 2, "pp": 2, "num_microbatches": 2}),
    "tp4": (4, {"tp": 4}),
    "zero3 dp2 tp2": (4, {"dp": 2, "tp": 2, "zero": 3}),
    "zero3 x4": (4, {"dp": 4, "zero": 3}),
    "zero3 x2": (2, {"dp": 2, "zero": 3}),
    "interleaved": (2, {"pp": 2, "num_microbatches": 2, "schedule": "interleaved", "virtual_stages": 2}),
    "one rank": (1, {}),
}


Goings = dict[tuple[str, str], tuple[list[float], dict[str, Tensor]]]


def _save_each(folder: str) -> tuple[dict[str, tuple[list[float], dict[str, Tensor]]], Goings]:
    """Under each plan of four ranks, six steps, a checkpoint after the third; and how each goes on from another's."""
    runs = {name: Run(constraints) for name, (ranks, constraints) in PLANS.items() if ranks == 4}
    saved = {}
    for name, run in runs.items():
        run.train(3)
        # Training goes on while it is written, and changes what was saved from.
        saving = run.save(f"{folder}/{name}", asynchronous=name != "dp2 pp2")
        losses = run.train(6)
        saving.wait()
        saved[name] = (losses, run.pm.full_state_dict())
    return saved, _go_on_from(folder, runs, ["dp2 pp2"])


def _go_on(folder: str, names: list[str], sources: list[str]) -> Goings:
    return _go_on_from(folder, {name: Run(PLANS[name][1], seed=1) for name in names}, sources)


def _go_on_from(folder: str, runs: dict[str, Run], sources: list[str]) -> Goings:
    found = {}
    for name, run in runs.items():
        for source in sources:
            progress = run.load(f"{folder}/{source}")
            assert (progress.step, progress.data) == (3, {"row": 3})
            found[source, name] = (run.train(6), run.pm.full_state_dict())
    return found


def test_saved_under_one_plan_goes_on_under_another(tmp_path: Path) -> None:
    results = run_ranks(_save_each, 4, str(tmp_path))
    saved = results[0][0]
    found = [goings for _, goings in results]
    for ranks in (2, 1):
        names = [name for name, (number, _) in PLANS.items() if number == ranks]
        found += run_ranks(_go_on, ranks, str(tmp_path), names, list(saved))
    assert len({pair for goings in found for pair in goings}) == 4 + 4 * 3
    for goings in found:
        for (source, name), (losses, state) in goings.items():
            expected_losses, expected_state = saved[source]
            assert losses == pytest.approx(expected_losses, rel=1e-5), f"{source} -> {name}"
            # The buffer counts microbatches, of which each plan has its own number.
            assert state.pop("seen") >= 6
            for key, value in state.items():
                torch.testing.assert_close(
                    value, expected_state[key], rtol=1e-4, atol=1e-5, msg=f"{source} -> {name}: {key}"
                )


def _two_optimizers(folder: str) -> None:
    """Saved on a tensor axis, loaded under ZeRO: one optimiser for matrices, another for vectors."""
    found = []
    for number, constraints in enumerate(({"tp": 2}, {"dp": 2, "zero": 3})):
        pm = autopar.parallelize(_net(number), 2, example_inputs=_batch(0), **constraints)
        optimizers = [
            torch.optim.AdamW([p for p in pm.parameters() if p.dim() > 1], lr=0.01, fused=number == 0),
            torch.optim.SGD([p for p in pm.parameters() if p.dim() == 1], lr=0.1 + number, momentum=0.9),
        ]

        def train(steps: range, pm: Any = pm, optimizers: Any = optimizers) -> None:
            for step in steps:
                pm.zero_grad()
                pm.step(**pm.shard_batch(_batch(step)))
                for optimizer in optimizers:
                    optimizer.step()

        if number == 0:
            train(range(2))
            autopar.save(pm, optimizers, folder)
        else:
            assert autopar.load(pm, optimizers, folder) == Progress(0, None)
            assert optimizers[1].param_groups[0]["lr"] == 0.1
        train(range(2, 4))
        found.append({name: value for name, value in pm.full_state_dict().items() if name != "seen"})
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_several_optimizers(tmp_path: Path) -> None:
    run_ranks(_two_optimizers, 2, str(tmp_path))


def _dropout(folder: str) -> tuple[list[float], list[float], Tensor, Tensor]:
    constraints = {"dp": 2}
    run = Run(constraints, dropout=0.3)
    run.train(3)
    torch.manual_seed(17 + dist.get_rank())
    run.save(folder)
    first, draw = run.train(6), torch.rand(3)
    torch.manual_seed(99)
    again = Run(constraints, seed=5, dropout=0.3)
    again.load(folder)
    return first, again.train(6), draw, torch.rand(3)


def test_random_numbers_go_on_under_the_same_plan(tmp_path: Path) -> None:
    draws = []
    for first, again, draw, draw_again in run_ranks(_dropout, 2, str(tmp_path)):
        assert first == again
        torch.testing.assert_close(draw, draw_again, rtol=0, atol=0)
        draws.append(draw)
    assert not torch.equal(*draws), "each rank has its own"


def _die_while_writing(folder: str, where: str) -> None:
    run = Run({"dp": 2})
    run.train(1)
    run.save(folder)
    run.train(2)
    target = getattr(AtomicWriter, where)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == (0 if where == "finish" else 1):
            if where == "write_data":
                target(*args, **kwargs)
            os._exit(1)
        return target(*args, **kwargs)

    setattr(AtomicWriter, where, dying)
    run.save(folder)


def _load_here(folder: str, options: dict[str, Any], wanted: dict[str, Any]) -> tuple[int, str]:
    run = Run(wanted, **options)
    before = {name: value.clone() for name, value in run.pm.full_state_dict().items()}
    try:
        return run.load(folder).step, ""
    except AutoparError as error:
        torch.testing.assert_close(run.pm.full_state_dict(), before, rtol=0, atol=0)
        return -1, f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("where", ["write_data", "finish"])
def test_a_crash_leaves_the_checkpoint_before(where: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="died"):
        run_ranks(_die_while_writing, 2, str(tmp_path), where)
    # The first rank removes what it wrote of the second one, if it lives.
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == (2 if where == "finish" else 1)
    assert run_ranks(_load_here, 1, str(tmp_path), {}, {}) == [(1, "")]


def _one(folder: str) -> None:
    run = Run({})
    for until in (1, 2):
        run.train(until)
        run.save(folder)


def _load_each(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [_load_here(folder, options, {"dp": 2})[1] for folder, options in cases]


def test_what_is_wrong_is_said_on_every_rank(tmp_path: Path) -> None:
    good = tmp_path / "good"
    run_ranks(_one, 1, str(good))
    (folder,) = (path for path in good.iterdir() if path.is_dir())

    def broken(name: str) -> Path:
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name / folder.name

    (next(broken("cut").glob("*.distcp"))).write_bytes(b"short")
    hostile = broken("hostile")
    (hostile / ".metadata").write_bytes(pickle.dumps(Hostile()))
    (hostile / MANIFEST).unlink()  # or nobody would read the other file
    (broken("empty") / "state.pt").write_bytes(b"")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("nothing", {}, "holds no checkpoint"),
        ("good", {"width": 8}, "model/embed.weight has shape (18, 12), expected (18, 8)"),
        ("good", {"optimizer": torch.optim.SGD}, "keeps nothing of embed.weight; the checkpoint has ['exp_avg'"),
        ("cut", {}, "has 5 bytes, expected"),
        ("hostile", {}, "which no checkpoint of autopar does"),
        ("empty", {}, "state.pt"),
    ]
    for messages in run_ranks(_load_each, 2, [(str(tmp_path / name), options) for name, options, _ in cases]):
        for message, (name, _, words) in zip(messages, cases, strict=True):
            assert message.startswith("CheckpointError") and words in message, f"{name}: {message}"


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("true",)
