"""The ops of captured, normalised models: each has a rule, and the rule is right at the sizes met there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel, op_nodes, tensor_operands
from autopar.ir.rules import known_rule
from autopar.ir.rules.call import call_of
from autopar.ir.rules.proof import check, runner
from autopar.passes.normalise import normalise

transformers = pytest.importorskip("transformers")

_TEXT = {"num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **_TEXT)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **_TEXT)
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **_TEXT))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=10, **_TEXT)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=10)
    return transformers.ResNetForImageClassification(config)


def captured(build: Callable[[], nn.Module]) -> CapturedModel:
    ids = torch.zeros(4, 8, dtype=torch.long)
    images = torch.zeros(4, 3, 16, 16)
    if build in (vit, resnet):
        inputs = {"pixel_values": images, "labels": torch.zeros(4, dtype=torch.long)}
    else:
        inputs = {"input_ids": ids, "labels": ids}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return normalise(capture(build().train(), inputs))


def values_of(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    # A number by itself is a count that something is divided by.
    return torch.randint(0 if shape else 1, 2, shape, generator=generator).to(dtype)


# Contents are undefined, or the op has no gradient in float64 for an operand: proved elsewhere.
_UNTRIED = {"aten::empty_like", "aten::_native_batch_norm_legit_functional"}


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama, mixtral, bert, t5, vit, resnet])
def test_ops_of_models(build: Callable[[], nn.Module]) -> None:
    generator = torch.Generator().manual_seed(0)
    seen: set[Any] = set()
    for node in op_nodes(captured(build).graph):
        call = call_of(node)
        if call in seen:
            continue
        seen.add(call)
        rule = known_rule(call)
        assert rule is not None, f"no rule for {call.name} at {node.meta.get('source')}"
        assert len(rule.operands) == len(tensor_operands(node))
        assert [len(dims) for dims in rule.results] == [len(result.shape) for result in call.results]
        if call.name in _UNTRIED:
            continue
        values = [values_of(o.shape, o.dtype, generator) for o in call.operands]
        constants = range(len(values)) if not any(r.dtype.is_floating_point for r in call.results) else ()
        for choice in rule.choices():
            communicates = choice in rule.lowered or "*" in rule.lowered
            if not communicates and rule.sizes.get(choice or "", 2) % 2 == 0:
                assert check(runner(node), values, rule, choice, constants=constants) is None
