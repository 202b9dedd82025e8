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


@pytest.mark.parametrize("constraints", [{"dp": 2, "tp": 2, "zero": 1}, {"pp": 2, "num_microbatches": 2}])
def test_the_trainer_evaluates(constraints: dict[str, int], tmp_path: Path) -> None:
    ranks = 4 if "dp" in constraints else 2
    for within, loss_only, wanted in run_ranks(evaluate, ranks, str(tmp_path), constraints):
        assert [entry["step"] for entry in within] == [2, 4]
        assert within[-1]["eval_loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert within[-1]["eval_accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
        assert within[-1]["eval_rows"] == wanted["rows"] == 16
        assert loss_only["eval_loss"] == pytest.approx(wanted["loss"], abs=1e-5)
