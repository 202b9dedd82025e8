"""Right: a decoder of transformers with dropout, handed over in eval mode as from_pretrained does, computes the loss of
the global batch beside this rank's rows of the logits; unequal numbers of tokens count."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

EVALUATES = True


def model():
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config).eval()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (4, 16), generator=generator)
    labels = tokens.clone()
    labels[0, 3:] = -100
    return {"input_ids": tokens, "labels": labels}
