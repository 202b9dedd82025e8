"""Graph networks; a batch is of small graphs, or of the nodes of one."""

from __future__ import annotations

from typing import Any

import torch
from models import BATCH, Case, random_classes
from torch import Tensor, nn
from torch.nn import functional as F

NODES, FEATURES, EDGES = 12, 16, 40


class GCN(nn.Module):
    """Graph convolutions with a normalised dense adjacency; the mean of the nodes is classified."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, adjacency: Tensor, labels: Tensor) -> Tensor:
        degree = adjacency.sum(-1).rsqrt()
        normalised = degree.unsqueeze(-1) * adjacency * degree.unsqueeze(-2)
        for layer in self.layers:
            x = F.relu(normalised @ layer(x))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class GAT(nn.Module):
    """Attention of each node to its neighbours, by a score that is a sum of one of each end."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.ModuleList([nn.Linear(FEATURES, width, bias=False), nn.Linear(width, width, bias=False)])
        self.here = nn.ParameterList(nn.Parameter(torch.randn(heads, width // heads) / 4) for _ in range(2))
        self.there = nn.ParameterList(nn.Parameter(torch.randn(heads, width // heads) / 4) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, adjacency: Tensor, labels: Tensor) -> Tensor:
        missing = (adjacency == 0).unsqueeze(1)
        for project, here, there in zip(self.project, self.here, self.there):
            h = project(x).unflatten(-1, (self.heads, -1))
            left, right = (h * here).sum(-1).transpose(1, 2), (h * there).sum(-1).transpose(1, 2)
            scores = F.leaky_relu(left.unsqueeze(-1) + right.unsqueeze(-2), 0.2).masked_fill(missing, -1e9)
            x = F.elu(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), h).flatten(2))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class MessagePassing(nn.Module):
    """Messages along the edges of one graph, added up at their targets; nodes are classified."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        x = self.enter(x)
        for message, update in zip(self.message, self.update):
            sent = F.relu(message(torch.cat([x[source], x[target]], dim=-1)))
            received = torch.zeros_like(x).index_add(0, target, sent)
            x = x + F.relu(update(torch.cat([x, received], dim=-1)))
        return F.cross_entropy(self.head(x), labels)


class GraphIsomorphism(nn.Module):
    """Sums of neighbours by scattering, perceptrons with batch statistics, sums over each graph."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = ((FEATURES, width), (width, width))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b)) for a, b in sizes
        )
        self.epsilon = nn.Parameter(torch.zeros(len(sizes)))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            sent = x.gather(1, edges[:, 0].unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            received = torch.zeros_like(x).scatter_add(1, edges[:, 1].unsqueeze(-1).expand_as(sent), sent)
            mixed = (1 + self.epsilon[number]) * x + received
            x = layer(mixed.flatten(0, 1)).view(*mixed.shape[:2], -1)
        return F.cross_entropy(self.head(x.sum(1)), labels)


class GraphTransformer(nn.Module):
    """Attention over all nodes, biased by learnt numbers for the distance of two nodes."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.enter = nn.Linear(FEATURES, width)
        self.distance = nn.Embedding(8, heads)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, distances: Tensor, labels: Tensor) -> Tensor:
        x = self.enter(x)
        bias = self.distance(distances).permute(0, 3, 1, 2)
        for qkv, out, norm in zip(self.qkv, self.out, self.norms):
            query, key, value = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(norm(x)).chunk(3, dim=-1)
            )
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            x = x + out(attended.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x.mean(1)), labels)


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 + step)


def _dense(step: int) -> dict[str, Any]:
    generator = _generator(step)
    x = torch.randn(BATCH, NODES, FEATURES, generator=generator)
    links = (torch.rand(BATCH, NODES, NODES, generator=generator) < 0.3).float()
    adjacency = ((links + links.transpose(1, 2) + torch.eye(NODES)) > 0).float()
    return {"x": x, "adjacency": adjacency, "labels": random_classes(step)}


def _one_graph(step: int) -> dict[str, Any]:
    generator = _generator(step)
    return {
        "x": torch.randn(4 * BATCH, FEATURES, generator=generator),
        "source": torch.randint(0, 4 * BATCH, (EDGES,), generator=generator),
        "target": torch.randint(0, 4 * BATCH, (EDGES,), generator=generator),
        "labels": torch.randint(0, 8, (4 * BATCH,), generator=generator),
    }


def _edge_lists(step: int) -> dict[str, Any]:
    generator = _generator(step)
    x = torch.randn(BATCH, NODES, FEATURES, generator=generator)
    edges = torch.randint(0, NODES, (BATCH, 2, EDGES), generator=generator)
    return {"x": x, "edges": edges, "labels": random_classes(step)}


def _distances(step: int) -> dict[str, Any]:
    generator = _generator(step)
    x = torch.randn(BATCH, NODES, FEATURES, generator=generator)
    distances = torch.randint(0, 8, (BATCH, NODES, NODES), generator=generator)
    return {"x": x, "distances": distances, "labels": random_classes(step)}


GRAPHS = (
    Case(name="gcn", build=GCN, batch=_dense),
    Case(name="gat", build=GAT, batch=_dense),
    Case(name="message_passing", build=MessagePassing, batch=_one_graph),
    Case(name="gin", build=GraphIsomorphism, batch=_edge_lists, learning_rate=0.02),
    Case(name="graph_transformer", build=GraphTransformer, batch=_distances),
)
