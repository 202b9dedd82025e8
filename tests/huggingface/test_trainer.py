"""ParallelTrainer evaluates: the loss and the predictions of the plain model, within training and outside."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.ir.errors import InvalidInput
from tests.harness import run_ranks

pytest.importorskip("accelerate")

ROWS, BATCH, SEQ = 19, 8, 12


def samples(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in range(ROWS):
        tokens = torch.randint(0, 48, (SEQ,), generator=generator)
        labels = tokens.clone()
        labels[: row % SEQ] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def accuracy(found: Any) -> dict[str, float]:
    """Of the tokens that count; and how many rows there were."""
    right = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
    counted = found.label_ids[:, 1:] != -100
    return {"accuracy": float(right[counted].mean()), "rows": float(len(found.label_ids))}


def expected(plain: Any, state: dict[str, Tensor]) -> dict[str, float]:
    plain.load_state_dict(state)
    plain.eval()
    rows = samples(1)[: ROWS // BATCH * BATCH]
    losses, logits = [], []
    with torch.no_grad():
        for first in range(0, len(rows), BATCH):
            batch = {key: torch.stack([row[key] for row in rows[first : first + BATCH]]) for key in rows[0]}
            output = plain(**batch)
            losses.append(float(output.loss))
            logits.append(output.logits)

    class Found:
        predictions = torch.cat(logits).numpy()
        label_ids = torch.stack([row["labels"] for row in rows]).numpy()

    return {"loss": sum(losses) / len(losses), **accuracy(Found)}


def evaluate(folder: str, constraints: dict[str, int]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from autopar.huggingface.trainer import ParallelTrainer

    # Accelerate wants what torchrun sets, though the group is there.
    ranks = str(dist.get_world_size())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": ranks}
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=48, n_positions=SEQ, n_embd=16, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    example = {key: torch.zeros(BATCH, SEQ, dtype=torch.long) for key in ("input_ids", "labels")}
    pm = autopar.parallelize(model, dist.get_world_size(), example_inputs=example, **constraints)
    settings: dict[str, Any] = {
        "output_dir": folder, "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    trainer = ParallelTrainer(
        pm, TrainingArguments(**settings), train_dataset=samples(0), eval_dataset=samples(1), compute_metrics=accuracy
    )
    trainer.train()
    assert pm.training is False
    within = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.compute_metrics = None
    loss_only = trainer.evaluate()
    with pytest.raises(InvalidInput, match="load_best_model_at_end"):
        more = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}
        ParallelTrainer(pm, TrainingArguments(**settings | more), train_dataset=samples(0), eval_dataset=samples(1))
    return within, loss_only, expected(copy.deepcopy(model), pm.full_state_dict())


SLOW = pytest.param({"dp": 2, "tp": 2, "zero": 1}, marks=pytest.mark.slow)


@pytest.mark.parametrize("constraints", [{"pp": 2, "num_microbatches": 2}, SLOW])
def test_the_trainer_evaluates(constraints: dict[str, int], tmp_path: Path) -> None:
    ranks = 4 if "dp" in constraints else 2
    for within, loss_only, wanted in run_ranks(evaluate, ranks, str(tmp_path), constraints):
        assert [entry["step"] for entry in within] == [2, 4]
        assert within[-1]["eval_loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert within[-1]["eval_accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
        assert within[-1]["eval_rows"] == wanted["rows"] == 16
        assert loss_only["eval_loss"] == pytest.approx(wanted["loss"], abs=1e-5)


def ragged(seed: int) -> list[dict[str, Any]]:
    """Samples of different lengths, each with its number."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, SEQ + 1, (ROWS,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(0, 48, (length,), generator=generator), "number": number}
        for number, length in enumerate(lengths)
    ]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As a collator with dynamic padding makes a batch: to its longest row, with a mask, and no label on padding."""
    longest = max(len(row["input_ids"]) for row in rows)
    tokens, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        tokens[place, :length] = labels[place, :length] = row["input_ids"]
        mask[place, :length] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def train_padded(folder: str) -> tuple[float, set[int]]:
    """Largest difference of a parameter from one process after four steps; the lengths of this rank's batches."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from autopar.huggingface.trainer import ParallelTrainer

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    alone = copy.deepcopy(model)
    data, seen, lengths = ragged(0), list[list[int]](), set[int]()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        seen.append([row["number"] for row in rows])
        batch = padded(rows)
        lengths.add(batch["input_ids"].shape[1])
        return batch

    pm = autopar.parallelize(model, 2, example_inputs=padded(data[:BATCH]), dp=2, num_microbatches=1)
    settings = TrainingArguments(
        output_dir=folder, max_steps=4, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=1e9, remove_unused_columns=False,
    )  # fmt: skip
    ParallelTrainer(pm, settings, train_dataset=data, data_collator=collate).train()
    batches: list[list[list[int]]] = [[], []]
    dist.all_gather_object(batches, seen[:4])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for pieces in zip(*batches, strict=True):
        optimizer.zero_grad()
        alone(**padded([data[number] for own in pieces for number in own])).loss.backward()
        optimizer.step()
    state = pm.full_state_dict()
    return max(float((state[n] - p).abs().max() / p.abs().max()) for n, p in alone.named_parameters()), lengths


def test_the_trainer_takes_batches_that_are_padded_to_their_longest_row(tmp_path: Path) -> None:
    found = run_ranks(train_padded, 2, str(tmp_path))
    assert found[0][1] != found[1][1], "ranks have batches of different lengths"
    for error, lengths in found:
        assert len(lengths) > 1
        assert error < 1e-5


def train_flattened(folder: str, constraints: dict[str, int]) -> float:
    """Largest difference of a parameter from one process, which runs the documents one by one, after four steps."""
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, TrainingArguments

    from autopar.huggingface.trainer import ParallelTrainer

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    alone = copy.deepcopy(model)
    data, seen = ragged(0), list[list[int]]()

    class Noted(DataCollatorWithFlattening):
        def __call__(self, features: list[dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
            seen.append([row["number"] for row in features])
            rows = [{"input_ids": row["input_ids"].tolist()} for row in features]
            return super().__call__(rows, *args, **kwargs)

    collate = Noted(return_tensors="pt")
    given = collate(data[: 2 * constraints.get("dp", 1)])
    if constraints.get("dp", 1) > 1:
        given = {name: torch.cat([value, value]) for name, value in given.items()}
    seen.clear()
    pm = autopar.parallelize(model, 2, example_inputs=given, num_microbatches=1, **constraints)
    settings = TrainingArguments(
        output_dir=folder, max_steps=4, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=1e9, remove_unused_columns=False,
        per_device_train_batch_size=3,
    )  # fmt: skip
    ParallelTrainer(pm, settings, train_dataset=data, data_collator=collate).train()
    batches: list[list[list[int]]] = [[], []]
    dist.all_gather_object(batches, seen[:4])
    pieces = batches[: pm.data_parallel_size]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in zip(*pieces, strict=True):
        rows = [data[number]["input_ids"][None] for own in step for number in own]
        count = sum(row.shape[1] - 1 for row in rows)
        optimizer.zero_grad()
        for row in rows:
            (alone(input_ids=row, labels=row).loss * (row.shape[1] - 1) / count).backward()
        optimizer.step()
    state = pm.full_state_dict()
    return max(float((state[n] - p).abs().max() / p.abs().max()) for n, p in alone.named_parameters())


@pytest.mark.parametrize("constraints", [{"dp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_the_trainer_takes_documents_without_padding(constraints: dict[str, int], tmp_path: Path) -> None:
    assert max(run_ranks(train_flattened, 2, str(tmp_path), constraints)) < 1e-5
