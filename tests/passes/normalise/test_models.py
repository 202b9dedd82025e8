"""Unmodified Hugging Face models in normal form compute what the models compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel, tensor_results
from autopar.ir.ops import composite
from autopar.passes.normalise import normalise
from tests.ir.models import assert_same_training

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, VOCABULARY = 4, 24, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def llama(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config), tokens()


def padded_llama() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = llama()
    lengths = torch.tensor([[24], [20], [9], [17]])
    return model, inputs | {"attention_mask": (torch.arange(LENGTH) < lengths).long()}


def mistral() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7)
    return transformers.MistralForCausalLM(config), tokens()


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config), tokens()


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config), tokens()


def qwen3_moe() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3
    )
    return transformers.Qwen3MoeForCausalLM(config), tokens()


def olmoe() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, eos_token_id=1)
    return transformers.OlmoeForCausalLM(config), tokens()


def deepseek_v3() -> tuple[nn.Module, dict[str, Any]]:
    """Sigmoid scores, experts chosen within groups, a shared expert, one dense layer."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1}
    config = transformers.DeepseekV3Config(
        **SIZES, **latent, **experts, num_key_value_heads=4, moe_intermediate_size=16, first_k_dense_replace=1
    )
    return transformers.DeepseekV3ForCausalLM(config), tokens()


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    mask = (torch.arange(LENGTH) < torch.tensor([[24], [20], [9], [17]])).long()
    return transformers.BertForMaskedLM(config), tokens() | {"attention_mask": mask}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    inputs = {"input_ids": tokens()["input_ids"], "labels": torch.randint(0, VOCABULARY, (BATCH, 10))}
    return transformers.T5ForConditionalGeneration(config), inputs


def vit() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))}
    return transformers.ViTForImageClassification(config), inputs


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    inputs = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH,))}
    return transformers.ResNetForImageClassification(config), inputs


def normal(model: nn.Module, inputs: dict[str, Any]) -> CapturedModel:
    return normalise(capture(model, inputs))


def counts(captured: CapturedModel) -> Counter[Any]:
    return Counter(node.target for node in captured.graph.nodes if node.op == "call_function")


def kinds(captured: CapturedModel) -> list[tuple[str, int]]:
    """(kind, number of operands) of every attention."""
    calls = [node for node in captured.graph.nodes if node.target is composite.attention]
    return [(str(node.kwargs["kind"]), len(node.args)) for node in calls]


@pytest.mark.parametrize(
    ("make", "attentions", "norms", "experts"),
    [
        (llama, [("causal", 3)] * 2, 5, 0),
        (padded_llama, [("causal", 4)] * 2, 5, 0),
        (mistral, [("sliding", 3)] * 2, 5, 0),
        (gpt2, [("causal", 3)] * 2, 0, 0),
        (mixtral, [("causal", 3)] * 2, 5, 2),
        (qwen3_moe, [("causal", 3)] * 2, 9, 2),
        (olmoe, [("causal", 3)] * 2, 9, 2),
        (deepseek_v3, [("causal", 3)] * 2, 9, 1),
        (bert, [("mask", 4)] * 2, 0, 0),
        (t5, [("mask", 4)] * 2 + [("causal", 4), ("full", 3)] * 2, 12, 0),
        (vit, [("full", 3)] * 2, 0, 0),
        (resnet, [], 0, 0),
    ],
)
def test_normal_form(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]],
    attentions: list[tuple[str, int]],
    norms: int,
    experts: int,
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    captured = normal(model, inputs)
    found = counts(captured)
    assert kinds(captured) == attentions
    assert (found[composite.rms_norm], found[composite.moe], found[composite.cross_entropy]) == (norms, experts, 1)
    for target in found:
        name = getattr(target, "__module__", "")
        assert isinstance(target, torch._ops.OpOverload) or name in ("autopar.ir.ops.composite", "_operator"), target
    assert_same_training(captured, model, inputs)


@pytest.mark.parametrize("make", [llama, padded_llama, mistral, gpt2, mixtral])
def test_a_causal_model_holds_no_square_of_the_sequence(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    captured = normal(*make())
    for node in captured.graph.nodes:
        for tensor in tensor_results(node):
            assert list(tensor.shape).count(LENGTH) < 2, node.format_node()


def test_eager_attention_is_the_same_program() -> None:
    torch.manual_seed(0)
    model, inputs = llama(attn_implementation="eager")
    captured = normal(model, inputs)
    assert kinds(captured) == [("causal", 3)] * 2
    assert_same_training(captured, model, inputs)


def test_tied_weights_have_one_placeholder() -> None:
    captured = normal(*gpt2())
    tied = [p.names for p in captured.parameters.values() if len(p.names) > 1]
    assert tied == [("transformer.wte.weight", "lm_head.weight")]


def test_a_long_sequence_and_a_large_batch_cost_no_memory() -> None:
    with torch.device("meta"):
        model, _ = llama(max_position_embeddings=4096)
        ids = torch.zeros(512, 4096, dtype=torch.long)
    captured = normal(model, {"input_ids": ids, "labels": ids})
    assert kinds(captured) == [("causal", 3)] * 2
    assert captured.batch_size == 512
