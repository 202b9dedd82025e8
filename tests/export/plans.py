"""Plans of a decoder with every kind of parallelism, for tests of what they are exported to."""

from __future__ import annotations

from typing import Any

from autopar.ir.plan import Batch, BlockPlan, ClusterRef, ModelRef, Plan, Prediction, StagePlan

ATTENTION = {"ring": "s&t", "gathered": "s", "heads": "h"}


def decoder_plan(
    *,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    tp: int = 1,
    virtual_stages: int = 1,
    num_microbatches: int = 1,
    microbatch_size: int = 1,
    layers: int = 8,
    kind: str = "ring",
    sequence_parallel: bool = False,
    experts: bool = False,
    shard: int | None = None,
    names: dict[str, str] | None = None,
    order: tuple[str, ...] = ("dp", "cp", "ep", "tp"),
    stages: list[StagePlan] | None = None,
    per_node: int = 8,
    gpu: str = "h100-sxm",
    predicted: bool = False,
    source: str | None = "examples/gpt.py",
    name: str = "decoder",
    **others: Any,
) -> Plan:
    """``embedding``, ``layers.*`` and ``head`` on axes of these sizes.

    shard: data ranks of a ZeRO group; dp is then two axes. names: of axes, instead of what they are for.
    """
    called = {"dp": "dp", "cp": "cp", "ep": "ep", "tp": "tp"} | (names or {})
    sizes = {"dp": dp, "cp": cp, "ep": ep, "tp": tp}
    mesh = {called[role]: sizes[role] for role in order}
    data = [called["dp"], called["ep"]]
    rows = {called["dp"]: "d0", called["cp"]: "d1", called["ep"]: "d0"}
    if shard is not None:
        first = called["dp"]
        mesh = {f"{first}_replicate": dp // shard, f"{first}_shard": shard} | {
            k: v for k, v in mesh.items() if k != first
        }
        data = [f"{first}_replicate", f"{first}_shard", called["ep"]]
        rows = {f"{first}_replicate": "d0", f"{first}_shard": "d0", called["cp"]: "d1", called["ep"]: "d0"}
        others.setdefault("shard_axes", [f"{first}_shard"])
    t, c, e = called["tp"], called["cp"], called["ep"]
    batch = {axis: "b" for axis, factor in rows.items() if factor == "d0"}
    wide, narrow = rows | {t: "n"}, rows | {t: "k"}
    layer = {
        "attention_norm/rms_norm": rows | ({t: "d1"} if sequence_parallel else {}),
        "attention.query/linear": wide,
        "attention.key/linear": wide,
        "attention/attention": batch | {c: ATTENTION[kind], t: "h"},
        "attention.out/linear": narrow,
    }
    if experts:
        layer["mlp/moe"] = rows | {e: "d0&experts", t: "f"}
    else:
        layer |= {"mlp.up/linear": wide, "mlp.down/linear": narrow}
    blocks = [
        BlockPlan(name="embedding", ops={"embedding": _on(mesh, rows | {t: "v"})}),
        BlockPlan(name="layers.*", repeats=layers, ops={key: _on(mesh, axes) for key, axes in layer.items()}),
        BlockPlan(name="head", ops={"linear": _on(mesh, wide), "cross_entropy": _on(mesh, rows | {t: "c"})}),
    ]
    if stages is None:
        stages = even_stages(layers, pp * virtual_stages)
    prediction = None
    if predicted:
        count = pp * virtual_stages
        prediction = Prediction(
            step_time_s=1.0, tokens_per_s_per_gpu=1.0, model_tflops_per_gpu=1.0, mfu=0.5, peak_memory_bytes=1,
            stage_forward_s=[0.01] * count, stage_backward_s=[0.02] * count,
        )  # fmt: skip
    ranks = pp * dp * cp * ep * tp
    return Plan(
        model=ModelRef(name=name, fingerprint="0", source=source, seq=1024),
        cluster=ClusterRef(gpu=gpu, num_gpus=ranks, gpus_per_node=per_node),
        batch=Batch(global_size=dp * ep * num_microbatches * microbatch_size, num_microbatches=num_microbatches),
        mesh=mesh,
        inputs=[axis for axis in data if axis in mesh],
        virtual_stages=virtual_stages,
        blocks=blocks,
        stages=stages,
        prediction=prediction,
        **others,
    )


def with_experts(plan: Plan, choices: dict[str, str]) -> Plan:
    """A plan whose mixtures of experts have these factors on these axes."""
    blocks = [
        block.model_copy(
            update={"ops": {key: axes | choices if key.endswith("/moe") else axes for key, axes in block.ops.items()}}
        )
        for block in plan.blocks
    ]
    return plan.model_copy(update={"blocks": blocks})


def even_stages(layers: int, count: int) -> list[StagePlan]:
    """Equal numbers of layers, the embedding on the first stage and the head on the last."""
    each = layers // count
    firsts = [0, *(1 + stage * each for stage in range(1, count))]
    lasts = [first - 1 for first in firsts[1:]] + [layers + 1]
    return [StagePlan(first=first, last=last) for first, last in zip(firsts, lasts, strict=True)]


def _on(mesh: dict[str, int], axes: dict[str, str]) -> dict[str, str]:
    return {axis: factor for axis, factor in axes.items() if axis in mesh}
