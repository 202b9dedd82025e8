"""Low-rank adapters on a frozen Llama. Right: exact under every plan, ZeRO-3 and saved extra modules included; FLOPs,
MFU and memory of frozen weights are those of weights without gradients; a checkpoint can hold the adapters alone."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def batch(seed):
    tokens = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}
