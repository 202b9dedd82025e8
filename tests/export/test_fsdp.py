"""The code is run: on gloo ranks it gives the losses and gradients of one process, at every ZeRO stage."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from autopar.export import export
from autopar.ir.errors import InexpressiblePlan
from autopar.ir.plan import Plan, StagePlan
from tests.export.plans import decoder_plan
from tests.harness import run_ranks

RANKS = 4
MICROBATCHES, ROWS = 2, 2
LAYERS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Named as the plan's blocks are; ``tied``: the embedding is the head, too."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(8, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def built(*, tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(tied=tied)


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(32, (RANKS * MICROBATCHES * ROWS, 5), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def as_module(text: str, name: str = "exported_fsdp") -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def step(text: str, tied: bool) -> dict[str, Any]:
    """One step on this rank: the loss, whole gradients, and which modules are wrapped."""
    code = as_module(text)
    model = code.parallelize(built(tied=tied))
    rows = batch().view(RANKS, MICROBATCHES, ROWS, -1)[dist.get_rank()]
    loss = code.backward(model, list(rows), loss_of)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        gradients[name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")] = whole
    wrapped = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    shards = {tuple(p.to_local().shape) for p in model.parameters() if hasattr(p, "to_local")}
    return {"loss": loss, "gradients": gradients, "wrapped": wrapped, "shards": shards}


def one_process(*, tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model = built(tied=tied)
    loss = loss_of(model, batch())
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fsdp_plan(**others: Any) -> Plan:
    remat = others.pop("remat", {})
    return decoder_plan(
        dp=RANKS, layers=LAYERS, num_microbatches=MICROBATCHES, microbatch_size=ROWS,
        stages=[StagePlan(first=0, last=LAYERS + 1, remat=remat, offload=others.pop("offload", False))], **others,
    )  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2 hybrid": {"zero": 2, "shard": 2},
    "zero 3, full": {"zero": 3, "remat": {"full": 3}},
    "zero 3, prefetch": {"zero": 3, "prefetch": 2, "reshard_after_forward": False},
    "zero 3 hybrid, selective": {"zero": 3, "shard": 2, "remat": {"full": 1, "alternate": 2, "selective": 2}},
    "zero 3 offloaded": {"zero": 3, "offload": True},
}


TIED = ("ddp", "zero 3, full")


def steps(texts: dict[tuple[str, bool], str]) -> dict[tuple[str, bool], dict[str, Any]]:
    """A step of every case; one process group serves them all."""
    return {(case, tied): step(text, tied) for (case, tied), text in texts.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, bool], dict[str, Any]]]:
    """By rank."""
    texts = {(case, False): export(fsdp_plan(**CASES[case]), "fsdp").text for case in CASES}
    texts |= {(case, True): texts[case, False] for case in TIED}
    return run_ranks(steps, RANKS, texts)


@pytest.mark.parametrize(("case", "tied"), [*((case, False) for case in CASES), *((case, True) for case in TIED)])
def test_a_step_is_that_of_one_process(case: str, tied: bool, results: list[Any]) -> None:
    plan = fsdp_plan(**CASES[case])
    expected, gradients = one_process(tied=tied)
    found = [result[case, tied] for result in results]
    assert sum(result["loss"] for result in found) / RANKS == pytest.approx(expected, rel=1e-6)
    for result in found:
        assert set(result["gradients"]) == set(gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-5, atol=1e-7)
    if plan.zero:
        names = {name.replace("._checkpoint_wrapped_module", "") for name in found[0]["wrapped"]}
        blocks = {"", *(f"layers.{number}" for number in range(LAYERS))}
        assert names == (blocks if tied else blocks | {"embedding", "head"})
        share = 2 if plan.shard_axes else RANKS
        assert (16 // share, 8) in found[0]["shards"]


def test_one_rank() -> None:
    plan = decoder_plan(layers=LAYERS, microbatch_size=RANKS * ROWS, num_microbatches=MICROBATCHES, zero=3)
    code = as_module(export(plan, "fsdp").text)
    assert code.WORLD_SIZE == 1 and code.AXES == {}
    found = code.blocks_of(built())
    assert [path for _, _, path in found] == ["embedding", *(f"layers.{n}" for n in range(LAYERS)), "head"]


def test_blocks_of_several_layers_and_other_models() -> None:
    plan = decoder_plan(layers=2, dp=2, zero=3)
    code = as_module(export(plan, "fsdp").text)
    paths = [path for _, _, path in code.blocks_of(built())]
    assert paths == ["embedding", *(f"layers.{n}" for n in range(LAYERS)), "head"]
    other = as_module(export(decoder_plan(layers=3, dp=2, zero=3), "fsdp").text)
    with pytest.raises(ValueError, match=r"3 blocks layers\.\*; the model has 4 such modules"):
        other.blocks_of(built())


def test_bfloat16_and_zero_stages_of_blocks(tmp_path: Path) -> None:
    plan = decoder_plan(dp=2, zero=3, precision="bf16", layers=LAYERS)
    blocks = [plan.blocks[0].model_copy(update={"zero": 0}), *plan.blocks[1:]]
    exported = export(plan.model_copy(update={"blocks": blocks}), "fsdp")
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in exported.text
    assert any(note.startswith("embedding: at ZeRO-1 instead of 0") for note in exported.notes)
    code = as_module(exported.text)
    assert [block.zero for block in code.BLOCKS] == [1, 3, 3]


@pytest.mark.parametrize(
    ("others", "words"),
    [({"tp": 2}, "tensor parallelism"), ({"cp": 2}, "context parallelism"), ({"pp": 2}, "a pipeline"),
     ({"ep": 2, "experts": True}, "expert parallelism")],
)  # fmt: skip
def test_what_fsdp_has_not_is_refused(others: dict[str, Any], words: str) -> None:
    plan = decoder_plan(dp=2, num_microbatches=2, **others)
    with pytest.raises(InexpressiblePlan, match=words) as refused:
        export(plan, "fsdp")
    assert "try: --to megatron" in str(refused.value)


def test_names_are_no_code() -> None:
    plan = decoder_plan(dp=2, name='"""\nraise SystemExit("broken")\n#', zero=1)
    odd = plan.blocks[0].model_copy(update={"name": "x'\"\\\n"})
    code = as_module(export(plan.model_copy(update={"blocks": [odd, *plan.blocks[1:]]}), "fsdp").text)
    assert code.BLOCKS[0].name == "x'\"\\\n"
