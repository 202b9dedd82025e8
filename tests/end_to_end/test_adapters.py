"""Models of peft: trained as by one process, and saved as the folder that peft reads."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from tests.harness import run_ranks

pytest.importorskip("peft")

METHODS = ("dora", "ia3", "lora", "prompt", "two")


def base() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapted(method: str) -> Any:
    from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    dora = LoraConfig(
        r=4, use_dora=True, target_modules=["q_proj", "down_proj"], rank_pattern={"layers.1.self_attn.q_proj": 2}
    )
    ia3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(base(), {"dora": dora, "ia3": ia3, "prompt": prompt}.get(method, lora))
    if method == "two":
        model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    return model


def batch(seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def train_and_save(folder: Path, methods: tuple[str, ...], constraints: dict[str, Any]) -> None:
    from peft import PeftModel

    warnings.simplefilter("ignore")
    for method in methods:
        alone = adapted(method)
        start = {name: value.clone() for name, value in alone.state_dict().items()}
        parallel = autopar.parallelize(copy.deepcopy(alone), 2, example_inputs=batch(0), **constraints)
        one, many = (torch.optim.SGD(m.parameters(), lr=0.5, weight_decay=0.1) for m in (alone, parallel))
        for step in range(2):
            loss = alone(**batch(step)).loss
            loss.backward()
            got = parallel.step(**parallel.shard_batch(batch(step)))
            assert abs(float(got) - float(loss.detach())) <= 1e-5 * abs(float(loss.detach())), method
            for optimizer in (one, many):
                optimizer.step()
                optimizer.zero_grad()
        for name, value in parallel.full_state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-4, atol=1e-6)
        parallel.save_pretrained(folder / method)
        if dist.get_rank() == 0:
            again = PeftModel.from_pretrained(base(), folder / method)
            assert any(not torch.equal(value, start[name]) for name, value in again.state_dict().items())
            with torch.no_grad():
                expected, found = (m.eval()(**batch(5)).logits for m in (alone, again))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, m=method: f"{m} {text}")


def test_adapters_are_trained_and_saved_as_peft_reads_them(tmp_path: Path) -> None:
    run_ranks(train_and_save, 2, tmp_path, ("prompt", "two"), {"dp": 2, "zero": 3})
    assert json.loads((tmp_path / "two/adapter_config.json").read_text())["peft_type"] == "LORA"
    assert sorted(path.name for path in (tmp_path / "two").rglob("*.safetensors")) == ["adapter_model.safetensors"] * 2
    # Of a model of 30,000 parameters what trains alone, a head of 2,048 among it.
    assert (tmp_path / "two/adapter_model.safetensors").stat().st_size < 20_000


OTHERS = ({"dp": 2, "zero": 0}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "num_microbatches": 2})


@pytest.mark.slow
@pytest.mark.parametrize("constraints", OTHERS, ids=str)
def test_adapters_under_other_plans(tmp_path: Path, constraints: dict[str, Any]) -> None:
    run_ranks(train_and_save, 2, tmp_path, METHODS, constraints)
