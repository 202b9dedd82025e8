"""Adapters of a weight as magnitude and direction (DoRA), of several ranks, and a head that is trained whole.
Right: exact under every plan; the frozen original of the head stays as it is."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(2)
        )
        self.classifier = nn.Linear(32, 8)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return nn.functional.cross_entropy(self.classifier(x.mean(1)), labels)


def model():
    config = LoraConfig(
        r=4,
        use_dora=True,
        target_modules=["up", "down"],
        rank_pattern={"layers.1.up": 2},
        modules_to_save=["classifier"],
    )
    return get_peft_model(Classifier(), config)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, (8, 12), generator=generator), torch.randint(8, (8,), generator=generator)
