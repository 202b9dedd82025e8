"""Right: a model that branches on ``self.training`` computes in eval mode what its other branch says.

The branches differ in ops and in parameters: training has an auxiliary head in the middle and noise that no dropout
module draws, evaluation averages two views of its input and returns probabilities and labels beside the scores.
"""

import torch
from torch import nn
from torch.nn import functional as F

EVALUATES = True


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        hidden = self.up(x)
        if self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        return x + self.down(F.gelu(hidden))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.auxiliary, self.head = nn.Linear(16, 4), nn.Linear(16, 4)

    def features(self, x):
        x, between = self.embed(x), None
        for number, layer in enumerate(self.layers):
            x = layer(x)
            between = x if number == 1 else between
        return x, between

    def forward(self, x, labels):
        if not self.training:
            scores = (self.head(self.features(x)[0]) + self.head(self.features(x.flip(1))[0])) / 2
            loss = F.cross_entropy(scores, labels)
            return {"loss": loss, "scores": scores, "classes": scores.argmax(1), "probabilities": scores.softmax(1)}
        last, between = self.features(x)
        scores = self.head(last)
        loss = F.cross_entropy(scores, labels) + 0.3 * F.cross_entropy(self.auxiliary(between), labels)
        return {"loss": loss, "scores": scores}


def model():
    return Model()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    return {"x": x, "labels": labels}
