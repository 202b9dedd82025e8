"""Scaled dot product attention with grouped heads.

    b (h g) s d, b h t d, b h t e -> b (h g) s e      d, t and e are blocked

Pieces of ``e`` would be right, but every rank would compute all scores: the work would not be divided.
Sharding the key/value heads ``h`` shards the query heads that read them. Sharding ``s`` under a causal or
sliding mask needs the position of the local queries: it is lowered. Keys are cut only where queries are
(``s&t``): a ring. It has no dropout, and no sinks, of which there is one for each query head: (h g). Documents that are
packed into rows are known of whole rows, ``b _``, on every rank, in natural order: local queries and keys have to know
their position, too.
"""

from __future__ import annotations

from autopar.ir.rule import DimFactors, FactorRule, TensorFactors
from autopar.ir.rules.call import Call, Operand
from autopar.ir.rules.factors import Factors, Rule, numel, operand_factors


def composite(call: Call) -> FactorRule | None:
    """``autopar.ir.ops.composite.attention``."""
    bound = call.bound()
    kind, window = bound["kind"], bound["window"]
    operands = bound["q"], bound["k"], bound["v"], bound["mask"]
    dropout, sinks, documents = bound["dropout_p"] > 0, bound["sinks"], bound["documents"]
    return _attention(call, *operands, kind, window, dropout=dropout, sinks=sinks, documents=documents)


def scaled_dot_product(call: Call) -> FactorRule | None:
    """``scaled_dot_product_attention``: any leading dimensions; only rank 4 has heads."""
    bound = call.bound()
    q, k, v = bound["query"], bound["key"], bound["value"]
    mask = bound["attn_mask"]
    kind = "causal" if bound["is_causal"] else "full" if mask is None else "mask"
    return _attention(call, q, k, v, mask, kind, None, dropout=bound["dropout_p"] > 0)


def _attention(
    call: Call,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Operand | None,
    kind: str,
    window: int | None,
    *,
    dropout: bool,
    sinks: Operand | None = None,
    documents: Operand | None = None,
) -> FactorRule | None:
    if len(q.shape) != 4 or len(k.shape) != 4 or len(v.shape) != 4:
        return None
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batch or v.shape[:3] != k.shape[:3] or heads % groups:
        return None
    factors = Factors()
    b, h = factors.dim("b", batch), factors.dim("h", groups)
    all_heads: DimFactors = h + factors.dim("g", heads // groups)
    s, t = factors.dim("s", queries), factors.dim("t", keys, block=True)
    d, e = factors.dim("d", size, block=True), factors.dim("e", v.shape[3], block=True)
    known: dict[int, TensorFactors] = {
        q.position: (b, all_heads, s, d),
        k.position: (b, h, t, d),
        v.position: (b, h, t, e),
    }
    if mask is not None:
        full: TensorFactors = (b, all_heads, s, t)
        shape = (batch, heads, queries, keys)
        offset = 4 - len(mask.shape)
        if offset < 0 or any(m not in (1, shape[offset + n]) for n, m in enumerate(mask.shape)):
            return None
        known[mask.position] = tuple(full[offset + n] if m > 1 else () for n, m in enumerate(mask.shape))
    if sinks is not None:
        known[sinks.position] = (all_heads,)
    if documents is not None:
        known[documents.position] = (b if documents.shape[0] > 1 else (), factors.fresh(keys))
    # Every rank must know which rows it has, and draw its own random numbers.
    lowered = {}
    if kind in ("causal", "sliding") or documents is not None:
        lowered["s"] = "attention"
    if dropout:
        lowered.update(dict.fromkeys(("b", "h", "g", "s", "*"), "attention"))
    elif sinks is None:
        lowered["s&t"] = "ring"
    return factors.rule(
        operand_factors(call, known, factors),
        [(b, all_heads, s, e)],
        lowered=lowered,
        joint=["s&t"] if "s&t" in lowered else [],
        flops=numel((batch, heads, queries)) * keys_seen(kind, window, keys) * (2 * size + 2 * v.shape[3] + 5),
    )


def keys_seen(kind: str, window: int | None, keys: int) -> float:
    """Keys of ``keys`` that a query sees, in the mean over queries, under a kind of mask.

    A window that is as wide as the keys are many is a causal mask.
    """
    width = min(window or keys, keys)
    return {"causal": keys / 2, "sliding": width * (1 - width / (2 * keys))}.get(kind, keys)


RULES: dict[str, Rule] = {"autopar::attention": composite, "aten::scaled_dot_product_attention": scaled_dot_product}
