"""Checkpoints of transformers: read in slices, trained under several plans, and written back as transformers does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import autopar
from autopar.huggingface import pretrained
from autopar.ir.errors import AutoparError
from autopar.runtime.checkpoint.safetensors_files import INDEX, SINGLE, TensorFiles
from tests.harness import run_ranks
from tests.runtime.held import held_bytes

RANKS, BATCH, SEQ, VOCABULARY = 4, 8, 12, 60
# Adam divides by the size of a gradient: with its usual 1e-8, one of 1e-9 moves a parameter by its rounding errors.
EPS = 1e-4
IDS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
LLAMA = transformers.LlamaConfig(
    **IDS, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
TIED = transformers.LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
GPT2 = transformers.GPT2Config(
    **IDS, n_embd=48, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
MIXTRAL = transformers.MixtralConfig(
    **IDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    num_local_experts=4,
)  # fmt: skip
MODELS = {
    "llama": transformers.LlamaForCausalLM,
    "tied": transformers.LlamaForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "mixtral": transformers.MixtralForCausalLM,
}
CONFIGS = {"llama": LLAMA, "tied": TIED, "gpt2": GPT2, "mixtral": MIXTRAL}
TENSOR = {"pp": 1, "dp": 2, "tp": 2, "cp": 1, "ep": 1, "zero": 0}
PIPELINE = {"pp": 2, "dp": 2, "tp": 1, "cp": 1, "ep": 1, "zero": 0, "num_microbatches": 2}
ZERO = {"pp": 1, "dp": 4, "tp": 1, "cp": 1, "ep": 1, "zero": 3}
BOTH = {"pp": 1, "dp": 2, "tp": 2, "cp": 1, "ep": 1, "zero": 3}
EXPERTS = {"pp": 1, "dp": 2, "tp": 1, "cp": 1, "ep": 2, "zero": 1}
Case = tuple[str, dict[str, int]]
FAST: list[Case] = [("llama", PIPELINE), ("llama", ZERO), ("tied", BOTH)]
SLOW: list[Case] = [("llama", TENSOR), ("gpt2", TENSOR), ("tied", PIPELINE), ("gpt2", ZERO), ("mixtral", EXPERTS)]


def _batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def _checkpoint(folder: Path, name: str) -> str:
    torch.manual_seed(0)
    MODELS[name](CONFIGS[name]).save_pretrained(folder / name)
    return str(folder / name)


class Counting(TensorFiles):
    last: TensorFiles

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        Counting.last = self


def _train(source: str, target: str, limits: dict[str, int], size: int | str) -> dict[str, Any]:
    pretrained.TensorFiles = Counting  # type: ignore[misc]  # in this process, which is a test's own
    before = held_bytes()
    parallel = autopar.from_pretrained(source, RANKS, example_inputs=_batch(0), **limits)
    own = sum(_local(value).numel() * 4 for _, value in parallel.named_parameters())
    held = held_bytes() - before
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, eps=EPS)
    losses = []
    for step in range(2):
        losses.append(float(parallel.step(**parallel.shard_batch(_batch(step)))))
        optimizer.step()
        optimizer.zero_grad()
    parallel.save_pretrained(target, max_shard_size=size)
    return {"losses": losses, "read": Counting.last.bytes_read, "own": own, "held": held}


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, torch.distributed.tensor.DTensor) else value


def _train_all(jobs: list[tuple[str, str, dict[str, int], int | str]]) -> list[dict[str, Any]]:
    return [_train(*job) for job in jobs]


def _reference(folder: str) -> tuple[list[float], Tensor]:
    """Losses of two steps by transformers alone, and logits after them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    losses = []
    for step in range(2):
        loss = model(**_batch(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, _logits(model)


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model.eval()(_batch(2)["input_ids"]).logits
    return logits


class Trained(NamedTuple):
    """A case, its folders, and what each rank says of it."""

    name: str
    source: Path
    written: Path
    is_sharded: bool
    ranks: list[dict[str, Any]]


@pytest.fixture(
    scope="module", params=[pytest.param(FAST, id="fast"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    """All cases in one start of the ranks, every second one written in several files."""
    folder = tmp_path_factory.mktemp("pretrained")
    sources = {name: _checkpoint(folder, name) for name, _ in request.param}
    jobs = [
        (sources[name], str(folder / f"out{number}"), limits, "20KB" if number % 2 else "5GB")
        for number, (name, limits) in enumerate(request.param)
    ]
    results = zip(*run_ranks(_train_all, RANKS, jobs), strict=True)
    return [
        Trained(name, Path(job[0]), Path(job[1]), job[3] == "20KB", list(ranks))
        for (name, _), job, ranks in zip(request.param, jobs, results, strict=True)
    ]


def test_trained_as_by_transformers(trained: list[Trained]) -> None:
    references = {case.name: _reference(str(case.source)) for case in trained}
    for case in trained:
        losses, logits = references[case.name]
        for result in case.ranks:
            assert result["losses"] == pytest.approx(losses, rel=1e-5), case
        assert (case.written / (INDEX if case.is_sharded else SINGLE)).exists()
        again, report = MODELS[case.name].from_pretrained(case.written, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        torch.testing.assert_close(_logits(again), logits, rtol=1e-4, atol=1e-4, msg=str(case))
        assert again.config.use_cache and again.config.architectures == [MODELS[case.name].__name__]
        assert sorted(_names(case.written)) == sorted(_names(case.source))


def _names(folder: Path) -> list[str]:
    return [name for file in folder.glob("*.safetensors") for name in load_file(file)]


def test_ranks_read_what_they_hold(trained: list[Trained]) -> None:
    for case in trained:
        for result in case.ranks:
            assert result["read"] == result["own"], case
            # Beside the parameters there are small buffers (frequencies of rotary embeddings) and padding by FSDP.
            assert result["own"] <= result["held"] <= result["own"] + 4096, case
        # No copy more than the plan has.
        whole = sum(file.stat().st_size for file in case.source.glob("*.safetensors"))
        assert max(result["read"] for result in case.ranks) < 0.75 * whole


def _refused(cases: list[str], good: str) -> list[str]:
    def message(work: Any) -> str:
        try:
            work()
        except AutoparError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    found = [
        message(lambda path=path: autopar.from_pretrained(path, 2, example_inputs=_batch(0), dp=2)) for path in cases
    ]
    parallel = autopar.from_pretrained(good, 2, example_inputs=_batch(0), **{**TENSOR, "dp": 1})
    before = {name: os.stat(f"{good}/{name}").st_mtime_ns for name in os.listdir(good)}
    torch.distributed.barrier()

    class Failing(pretrained.HuggingFaceFormat):
        def write_config(self, folder: Path, dtype: torch.dtype) -> None:
            raise OSError("no space left on device")

    form = parallel._pretrained
    assert isinstance(form, pretrained.HuggingFaceFormat)
    parallel._pretrained = Failing(form.model_class, form.config, form.generation_config)
    found.append(message(lambda: parallel.save_pretrained(good)))
    assert before == {name: os.stat(f"{good}/{name}").st_mtime_ns for name in os.listdir(good)}
    torch.distributed.barrier()
    parallel._pretrained = form
    parallel.save_pretrained(good, max_shard_size="20KB")
    assert not os.path.exists(f"{good}/{SINGLE}") and os.path.exists(f"{good}/{INDEX}")
    torch.distributed.barrier()
    parallel.save_pretrained(good)
    assert sorted(os.listdir(good)) == ["config.json", "generation_config.json", SINGLE]
    parallel._pretrained = None
    found.append(message(lambda: parallel.save_pretrained(good)))
    return found


def test_every_rank_refuses_what_does_not_fit(tmp_path: Path) -> None:
    good = _checkpoint(tmp_path, "llama")
    original = load_file(Path(good) / SINGLE)

    def changed(name: str, **values: Tensor) -> str:
        MODELS["llama"](LLAMA).save_pretrained(tmp_path / name)
        weights = {**original, **{key.replace("__", "."): value for key, value in values.items()}}
        save_file({k: v for k, v in weights.items() if v.numel()}, tmp_path / name / SINGLE, {"format": "pt"})
        return str(tmp_path / name)

    cases = [
        changed("missing", model__norm__weight=torch.zeros(0)),
        changed("unknown", model__other__weight=torch.zeros(2)),
        changed("shape", model__norm__weight=torch.zeros(3)),
        str(tmp_path / "nothing"),
    ]
    words = [
        "CheckpointError: ", "model.norm.weight is missing",
        "CheckpointError: ", "model.other.weight is not in the model",
        "CheckpointError: ", "model.norm.weight has shape (3,), expected (48,)",
        "InvalidModelFile: ", "there is no Hugging Face config",
        "CheckpointError: ", "no space left on device",
        "InvalidInput: ", "is not a model of transformers",
    ]  # fmt: skip
    for messages in run_ranks(_refused, 2, cases, good):
        for message, kind, part in zip(messages, words[::2], words[1::2], strict=True):
            assert message.startswith(kind) and part in message


def _parallelized(target: str, dtype: torch.dtype, source: str) -> dict[str, Tensor]:
    """A model that was in memory is written too; one read in another dtype is in that one."""
    torch.manual_seed(0)
    model = MODELS["gpt2"](GPT2).train()
    model.config.use_cache = False
    parallel = autopar.parallelize(model, 2, example_inputs=_batch(0), **{**TENSOR, "dp": 1})
    parallel.save_pretrained(target)
    narrow = autopar.from_pretrained(source, 2, example_inputs=_batch(0), dtype=dtype, **{**TENSOR, "dp": 1})
    assert {value.dtype for value in narrow.parameters()} == {dtype}
    full: dict[str, Tensor] = narrow.full_state_dict()
    return full


def test_models_in_memory_and_other_dtypes(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path, "llama")
    expected = MODELS["llama"].from_pretrained(source, dtype=torch.bfloat16)
    expected.save_pretrained(tmp_path / "narrow")
    found = run_ranks(_parallelized, 2, str(tmp_path / "out"), torch.float32, str(tmp_path / "narrow"))
    torch.manual_seed(0)
    torch.testing.assert_close(
        MODELS["gpt2"].from_pretrained(tmp_path / "out").state_dict(), MODELS["gpt2"](GPT2).state_dict()
    )
    for state in found:
        wide = {name: value.float() for name, value in expected.state_dict().items()}
        torch.testing.assert_close(state, wide, rtol=0, atol=0)
