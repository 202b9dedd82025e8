"""Recommenders: tables of embeddings, and few products."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from models import BATCH, Case
from torch import Tensor, nn
from torch.nn import functional as F

ITEMS, FIELDS, DENSE, HISTORY = 64, 4, 8, 6


def _perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Bags of embeddings and dense features; all pairs of them are multiplied."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ITEMS, width, mode="sum") for _ in range(FIELDS))
        self.bottom = _perceptron(DENSE, 32, width)
        self.top = _perceptron(width + (FIELDS + 1) * FIELDS // 2, 32, 1)
        rows, columns = torch.tril_indices(FIELDS + 1, FIELDS + 1, offset=-1)
        self.register_buffer("pairs", rows * (FIELDS + 1) + columns)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        features = torch.stack([bottom, *(t(sparse[:, n]) for n, t in enumerate(self.tables))], dim=1)
        products = (features @ features.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits = self.top(torch.cat([bottom, products], dim=1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, labels)


class DeepFM(nn.Module):
    """A factorisation machine beside a perceptron, over one table with an offset for each field."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Embedding(ITEMS * FIELDS, 1)
        self.embedding = nn.Embedding(ITEMS * FIELDS, width)
        self.deep = _perceptron(FIELDS * width, 32, 1)
        self.register_buffer("offsets", torch.arange(FIELDS) * ITEMS)

    def forward(self, fields: Tensor, labels: Tensor) -> Tensor:
        places = fields + self.offsets
        v = self.embedding(places)
        second = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1)
        logits = self.linear(places).sum((1, 2)) + second + self.deep(v.flatten(1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, labels)


class TwoTowers(nn.Module):
    """Users and items as unit vectors; the other items of the batch are what was not chosen."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(ITEMS, 32), nn.Embedding(ITEMS, 32)
        self.user_tower, self.item_tower = _perceptron(32, 64, width), _perceptron(32, 64, width)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        users = F.normalize(self.user_tower(self.users(user)), dim=-1)
        items = F.normalize(self.item_tower(self.items(item)), dim=-1)
        return F.cross_entropy(users @ items.T / 0.2, torch.arange(len(user), device=user.device))


class NCF(nn.Module):
    """Matrix factorisation beside a perceptron over user and item."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.user_mf, self.item_mf = nn.Embedding(ITEMS, width), nn.Embedding(ITEMS, width)
        self.user_mlp, self.item_mlp = nn.Embedding(ITEMS, width), nn.Embedding(ITEMS, width)
        self.mlp = _perceptron(2 * width, 32, width)
        self.head = nn.Linear(2 * width, 1)

    def forward(self, user: Tensor, item: Tensor, labels: Tensor) -> Tensor:
        deep = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], dim=-1))
        logits = self.head(torch.cat([self.user_mf(user) * self.item_mf(item), deep], dim=-1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, labels)


class DeepInterest(nn.Module):
    """A history of items, weighted by how each fits the candidate."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, width, padding_idx=0)
        self.fit = _perceptron(4 * width, 32, 1)
        self.head = _perceptron(2 * width, 32, 1)

    def forward(self, history: Tensor, candidate: Tensor, labels: Tensor) -> Tensor:
        past, now = self.items(history), self.items(candidate)
        beside = now.unsqueeze(1).expand_as(past)
        scores = self.fit(torch.cat([past, beside, past - beside, past * beside], dim=-1)).squeeze(-1)
        weights = scores.masked_fill(history == 0, -1e9).softmax(-1)
        pooled = (weights.unsqueeze(1) @ past).squeeze(1)
        return F.binary_cross_entropy_with_logits(self.head(torch.cat([pooled, now], dim=-1)).squeeze(-1), labels)


def _indices(step: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, ITEMS, shape, generator=torch.Generator().manual_seed(11_000 + step + 97 * len(shape)))


def _clicks(step: int) -> Tensor:
    return torch.randint(0, 2, (BATCH,), generator=torch.Generator().manual_seed(11_500 + step)).float()


def _dlrm_batch(step: int) -> dict[str, Any]:
    dense = torch.randn(BATCH, DENSE, generator=torch.Generator().manual_seed(11_700 + step))
    return {"dense": dense, "sparse": _indices(step, BATCH, FIELDS, 3), "labels": _clicks(step)}


def _deepfm_batch(step: int) -> dict[str, Any]:
    return {"fields": _indices(step, BATCH, FIELDS), "labels": _clicks(step)}


def _pairs(step: int) -> dict[str, Any]:
    return {"user": _indices(step, BATCH), "item": _indices(step + 50, BATCH)}


def _rated_pairs(step: int) -> dict[str, Any]:
    return {**_pairs(step), "labels": _clicks(step)}


def _histories(step: int) -> dict[str, Any]:
    history = _indices(step, BATCH, HISTORY, low=1)
    history[:, -1] = torch.where(_clicks(step) > 0, 0, history[:, -1])  # some are shorter
    return {"history": history, "candidate": _indices(step, BATCH, low=1), "labels": _clicks(step + 1)}


RECOMMENDATION = (
    Case(name="dlrm", build=DLRM, batch=_dlrm_batch),
    Case(name="deepfm", build=DeepFM, batch=_deepfm_batch, learning_rate=0.02),
    Case(name="two_towers", build=TwoTowers, batch=_pairs),
    Case(name="ncf", build=NCF, batch=_rated_pairs),
    Case(name="deep_interest", build=DeepInterest, batch=_histories),
)
