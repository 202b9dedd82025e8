"""Small models in which each pass of normalisation has something to do, and the text before and after it.

python -m tests.passes.golden.rewrites     writes the texts anew, to be read before they are kept
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from difflib import unified_diff
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.placement import Replicate, Shard
from autopar.passes.normalise import normal_form
from autopar.passes.pipeline import run_passes
from autopar.passes.printing import captured_text

FOLDER = Path(__file__).parent / "normalise"

# Batch, sequence, hidden size, classes, heads and their size.
B, S, H, C, HEADS, D = 2, 6, 8, 5, 2, 4


class Net(nn.Module):
    """Its forward is ``body(self, x (B, S, H), y (B, S))``, y integers."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.scale, self.bias, self.classes = (nn.Parameter(torch.empty(n)) for n in (H, C, C))
        self.columns, self.rows = nn.Parameter(torch.empty(H, C)), nn.Parameter(torch.empty(C, H))
        self.q, self.k, self.v = (nn.Linear(H, H, bias=False) for _ in range(3))
        self.qkv = nn.Linear(H, 3 * H)
        self.pair, self.pair_bias = nn.Parameter(torch.empty(H, 2 * H)), nn.Parameter(torch.empty(2 * H))
        self.head_bias, self.sinks = nn.Parameter(torch.empty(HEADS, S, S)), nn.Parameter(torch.empty(HEADS))
        # Of four experts, in the dtype that a grouped product takes.
        self.router, self.up, self.down = (
            nn.Parameter(torch.empty(4, *sizes, dtype=torch.bfloat16)) for sizes in ((H,), (H, 2 * H), (H, H))
        )
        self.attend = nn.MultiheadAttention(H, HEADS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self, x, y)


# ---- annotations ----


def constrained_hidden(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return autopar.constrain(F.linear(x, m.rows), {"tp": Shard(2)}).relu().sum()


def constrained_batch(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.linear(autopar.constrain(x * m.scale, {"dp": Shard(0), "tp": Replicate()}), m.rows).sum()


def constrained_twice(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return autopar.constrain(autopar.constrain(m.q(x), {"cp": Shard(1)}).relu(), {"tp": Shard(2)}).square().sum()


# ---- writes into slices, filled tensors, indices ----


def shifted_states(m: Net, x: Tensor, y: Tensor) -> Tensor:
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = (x * m.scale)[:, :-1]
    return shifted.square().sum()


def filled_first(m: Net, x: Tensor, y: Tensor) -> Tensor:
    h = x * m.scale
    h[:, 0] = 3.0
    return h.square().sum()


def shifted_labels(m: Net, x: Tensor, y: Tensor) -> Tensor:
    labels = y.new_full(y.shape, -100)
    labels[:, :-1] = y[:, 1:]
    return F.cross_entropy(F.linear(x, m.rows).view(-1, C), labels.view(-1))


def ones_beside(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x * m.scale, x.new_ones(B, S, 1)], -1).square().sum()


def padding_by_positions(m: Net, x: Tensor, y: Tensor) -> Tensor:
    rows, places = torch.arange(B)[:, None, None, None], torch.arange(S)
    seen = (y[rows, places[None, None, None, :]] != 0) & (places[None, :] <= places[:, None])
    return F.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), seen).square().sum()


def transposing_index(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x * m.scale)[torch.arange(B)[None, :], torch.arange(S)[:, None]].square().sum()


def known_columns(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x * m.scale)[:, :, [4, 5]].square().sum()


def last_token(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return m.q(x)[torch.arange(B), y.argmax(-1)].square().sum()


def last_but_one(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x * m.scale)[torch.arange(B), y.argmax(-1) - 2].sum()


def entry_of_each(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x @ m.scale)[torch.arange(B), y.argmin(-1)].sum()


# ---- bags of embeddings ----


def bags_of_one_size(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.embedding_bag(y, m.rows, mode="mean").square().sum()


def bags_by_offsets(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.embedding_bag(y.reshape(-1), m.rows, torch.arange(B) * S, mode="max").square().sum()


def ragged_bags(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.embedding_bag(y.reshape(-1), m.rows, y[:, 0] * 0, mode="sum", padding_idx=0).square().sum()


# ---- linear layers, rows and heads ----


def layer_by_columns(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(m.bias, x.view(-1, H), m.columns).view(B, S, C).square().sum()


def transposed_layer(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, m.columns.t(), m.bias).square().sum()


def product_and_bias(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x @ m.columns + m.bias).square().sum()


def router_on_rows(m: Net, x: Tensor, y: Tensor) -> Tensor:
    weights, index = F.softmax(F.linear(x.view(-1, H), m.rows), dim=1).topk(2, dim=-1)
    return (weights / weights.sum(1, keepdim=True) * index).view(B, S, 2).square().sum()


def router_in_groups(m: Net, x: Tensor, y: Tensor) -> Tensor:
    """Two of the experts of that half of them whose scores add up to more."""
    scores = F.linear(x.view(-1, H).to(torch.bfloat16), m.router).sigmoid()
    halves = scores.view(-1, 2, 2).topk(2, dim=-1)[0].sum(-1)
    best = torch.zeros_like(halves).scatter_(1, halves.topk(1, dim=-1)[1], 1)
    mask = best.unsqueeze(-1).expand(-1, 2, 2).reshape(-1, 4)
    index = scores.masked_fill(~mask.bool(), 0.0).topk(2, dim=-1)[1]
    return scores.gather(1, index).view(B, S, 2).square().sum()


def sequence_first(m: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return m.attend(x, x, x, need_weights=False)[0].square().sum()  # type: ignore[no-any-return]


def merged(x: Tensor) -> Tensor:
    """(B, S, H) -> (B * HEADS, S, D)."""
    return heads(x).reshape(B * HEADS, S, D)


def heads(x: Tensor) -> Tensor:
    """(B, S, H) -> (B, HEADS, S, D)."""
    return x.view(B, S, HEADS, D).transpose(1, 2)


def merged_heads(m: Net, x: Tensor, y: Tensor) -> Tensor:
    scores = torch.bmm(merged(m.q(x)), merged(m.k(x)).transpose(1, 2))
    return torch.bmm(scores.softmax(2), merged(m.v(x))).view(B, HEADS, S, D).square().sum()


def added_by_the_product(m: Net, x: Tensor, y: Tensor) -> Tensor:
    slopes = torch.arange(1, HEADS + 1)[:, None, None] * torch.arange(S)[None, None, :]
    bias = (slopes * torch.ones(B, 1, 1, 1)).reshape(B * HEADS, 1, S)
    scores = torch.baddbmm(bias, merged(m.q(x)), merged(m.k(x)).transpose(1, 2), alpha=1 / math.sqrt(D))
    return torch.bmm(scores.softmax(-1), merged(m.v(x))).square().sum()


def learned_bias(m: Net, x: Tensor, y: Tensor) -> Tensor:
    scores = torch.bmm(merged(m.q(x)), merged(m.k(x)).transpose(1, 2)) + m.head_bias.repeat(B, 1, 1)
    return torch.bmm(scores.softmax(-1), merged(m.v(x))).square().sum()


# ---- fused layers, norms ----


def queries_keys_values(m: Net, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = m.qkv(x).split(H, -1)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True).square().sum()


def stacked_heads(m: Net, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(B, S, 3, HEADS, D).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).square().sum()


def gate_and_value(m: Net, x: Tensor, y: Tensor) -> Tensor:
    gate, value = torch.addmm(m.pair_bias, x.view(-1, H), m.pair).view(B, S, 2 * H).chunk(2, -1)
    return (F.silu(gate) * value).square().sum()


def norm_by_powers(m: Net, x: Tensor, y: Tensor) -> Tensor:
    h = m.q(x)
    return (m.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5))).sum()


def norm_in_float32(m: Net, x: Tensor, y: Tensor) -> Tensor:
    wide = (x * m.scale).to(torch.bfloat16).float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
    return (m.scale.to(torch.bfloat16) * wide.to(torch.bfloat16)).sum()


def norm_of_torch(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.rms_norm(m.q(x), (H,), m.scale + 1, 1e-5).sum()


# ---- attention ----


def divided_and_masked(m: Net, x: Tensor, y: Tensor) -> Tensor:
    scores = heads(m.q(x)) @ heads(m.k(x)).transpose(-1, -2) / math.sqrt(D)
    unseen = torch.ones(S, S, dtype=torch.bool).triu(1)
    return (scores.masked_fill(unseen, -math.inf).softmax(-1) @ heads(m.v(x))).square().sum()


def padded_and_dropped(m: Net, x: Tensor, y: Tensor) -> Tensor:
    padding = torch.where(y == 0, torch.finfo(torch.float32).min, 0.0)[:, None, None, :]
    weights = (heads(m.q(x)) @ heads(m.k(x)).transpose(-1, -2) * 0.5 + padding).softmax(-1)
    return (F.dropout(weights, 0.1) @ heads(m.v(x))).square().sum()


def sinks(m: Net, x: Tensor, y: Tensor) -> Tensor:
    scores = heads(m.q(x)) @ heads(m.k(x)).transpose(-1, -2)
    scores = torch.cat([scores, m.sinks.view(1, HEADS, 1, 1).expand(B, HEADS, S, 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ heads(m.v(x))).square().sum()


def repeated_heads(m: Net, x: Tensor, y: Tensor) -> Tensor:
    few = [h(x)[..., :D].view(B, S, 1, D).transpose(1, 2) for h in (m.k, m.v)]
    k, v = (t[:, :, None].expand(B, 1, HEADS, S, D).reshape(B, HEADS, S, D) for t in few)
    places = torch.arange(S)
    seen = places[None, None, None, :] <= places[None, None, :, None]
    return F.scaled_dot_product_attention(heads(m.q(x)), k, v, attn_mask=seen).square().sum()


def sliding_window(m: Net, x: Tensor, y: Tensor) -> Tensor:
    places = torch.arange(S)
    distance = places[:, None] - places[None, :]
    seen = (distance >= 0) & (distance < 3)
    return F.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), seen).square().sum()


def documents(m: Net, x: Tensor, y: Tensor) -> Tensor:
    same = y[:, None, :, None] == y[:, None, None, :]
    seen = same & torch.ones(S, S, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), seen).square().sum()


# ---- losses, means and terms ----


def loss_over_rows(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, m.rows).view(-1, C), y.view(-1))


def loss_of_classes_second(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, m.rows).transpose(1, 2), y, reduction="sum")


def smoothed_loss_of_next(m: Net, x: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(x, m.rows).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), label_smoothing=0.1)


def weighted_classes(m: Net, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.arange(1.0, C + 1)
    return F.cross_entropy(F.linear(x, m.rows).view(-1, C), y.view(-1), weight=weights)


def likelihood(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.linear(x, m.rows).log_softmax(-1).transpose(1, 2), y, ignore_index=3)


def means_of_means(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x * m.scale).mean(1).square().mean()


def mean_in_float64(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x * m.scale).mean((0, 1), dtype=torch.float64).exp().sum()


def pooled_loss(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return 1.0 - F.cosine_similarity(m.q(x).mean(1), x.mean(1)).mean()


def mean_of_loss(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.q(x), x) + F.huber_loss(m.k(x), x)


def number_added(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return (x * m.scale).sum() + 2.0


def number_taken(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return ((x * m.scale).square().sum() - 1).abs()


# ---- mixtures of experts ----


def experts(m: Net, x: Tensor, up: Tensor, between: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows sorted by expert, two grouped products with ``between`` between them, and the way back."""
    x = x.to(torch.bfloat16)
    weights, index = F.softmax(F.linear(x, m.router), -1).topk(2, -1)
    chosen, order = index.reshape(-1).sort()
    ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
    rows = torch._grouped_mm(x.reshape(-1, H)[order // 2], up, ends)
    down = torch._grouped_mm(between(rows), m.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return down[inverse].view(-1, 2, H).sum(1).square().sum()


def experts_with_halves(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return experts(m, x, m.up, lambda up: F.silu(up[:, :H]) * up[:, H:])


def experts_interleaved(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return experts(m, x, m.up, lambda up: F.gelu(up[:, ::2]) * up[:, 1::2])


def experts_without_gate(m: Net, x: Tensor, y: Tensor) -> Tensor:
    return experts(m, x, m.down.transpose(1, 2), F.relu)


# Of each pass, models in which it has something to do.
CASES: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "read-annotations": (constrained_hidden, constrained_batch, constrained_twice),
    "scatters-to-cat": (shifted_states, filled_first, shifted_labels),
    "detach-creations": (shifted_states, shifted_labels, ones_beside),
    "identity-index-to-view": (padding_by_positions, transposing_index, known_columns),
    "picks-to-gather": (last_token, last_but_one, entry_of_each),
    "recognise-bags": (bags_of_one_size, bags_by_offsets, ragged_bags),
    "recognise-linear": (layer_by_columns, transposed_layer, product_and_bias),
    "unflatten": (layer_by_columns, router_on_rows, router_in_groups, sequence_first),
    "unmerge-products": (merged_heads, added_by_the_product, learned_bias),
    "clean-up": (layer_by_columns, router_on_rows, sequence_first),
    "split-fused-linear": (queries_keys_values, stacked_heads, gate_and_value),
    "recognise-rms-norm": (norm_by_powers, norm_in_float32, norm_of_torch),
    "fuse-eager-attention": (divided_and_masked, padded_and_dropped, sinks),
    "recognise-attention": (repeated_heads, sliding_window, documents),
    "recognise-cross-entropy": (loss_over_rows, loss_of_classes_second, smoothed_loss_of_next),
    "split-loss-means": (loss_over_rows, weighted_classes, likelihood),
    "recognise-moe": (experts_with_halves, experts_interleaved, experts_without_gate),
    "split-means": (means_of_means, mean_in_float64, pooled_loss, mean_of_loss),
    "numbers-to-terms": (pooled_loss, number_added, number_taken),
}


def models() -> dict[str, Callable[..., Tensor]]:
    """Every model, by name."""
    return {body.__name__: body for bodies in CASES.values() for body in bodies}


@cache
def captured_model(name: str) -> CapturedModel:
    """A model as it was traced, on the meta device."""
    with torch.device("meta"):
        net, inputs = Net(models()[name]), (torch.empty(B, S, H), torch.zeros(B, S, dtype=torch.int64))
    return capture(net, inputs)


def text(pass_name: str) -> str:
    """Of each of its models, the program before the first run of a pass that changes it, and the lines it changes."""
    parts = []
    for body in CASES[pass_name]:
        before, after = next(_changes(body.__name__, pass_name))
        lines = unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        parts.append("\n".join((f"# {body.__name__}", before, f"# after {pass_name}", *changed)) + "\n")
    return "\n".join(parts)


def _changes(model: str, pass_name: str) -> Iterator[tuple[str, str]]:
    """The texts before and after each run of a pass that changes something."""
    captured = captured_model(model)
    texts = [("", captured_text(captured))]
    run_passes(captured, normal_form(), after=lambda name, left: texts.append((name, captured_text(left))))
    for (_, before), (name, after) in pairwise(texts):
        if name == pass_name and before != after:
            yield before, after


def path_of(pass_name: str) -> Path:
    return FOLDER / f"{pass_name}.txt"


if __name__ == "__main__":
    for name in CASES:
        path_of(name).write_text(text(name))
