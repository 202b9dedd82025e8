"""A plan with every kind of sharding in it, for tests of what shows plans."""

from __future__ import annotations

from autopar.ir.plan import Batch, BlockPlan, ClusterRef, ModelRef, Plan, Prediction, StagePlan

GIB = 2**30

LAYER = {
    "attention_norm/rms_norm": {"dp": "b", "tp": "s"},
    "attention.query/linear": {"dp": "b", "tp": "n"},
    "attention.key/linear": {"dp": "b", "tp": "n"},
    "attention.value/linear": {"dp": "b", "tp": "n"},
    "attention/attention": {"dp": "b", "tp": "h"},
    "attention.out/linear": {"dp": "b", "tp": "k"},
    "mlp.gate/linear": {"dp": "b", "tp": "n"},
    "mlp.up/linear": {"dp": "b", "tp": "n"},
    "mlp.down/linear": {"dp": "b", "tp": "k"},
}


def sample_plan(*, predicted: bool = True) -> Plan:
    """64 ranks: 4 uneven stages of dp 2 × tp 8, rematerialisation on two of them."""
    prediction = Prediction(
        step_time_s=9.84,
        tokens_per_s_per_gpu=3330.1,
        model_tflops_per_gpu=171.5,
        mfu=0.55,
        peak_memory_bytes=71 * GIB,
        stage_memory_bytes=[71 * GIB, 66 * GIB, 60 * GIB, 64 * GIB],
        stage_forward_s=[0.18, 0.19, 0.19, 0.2],
        stage_backward_s=[0.42, 0.38, 0.38, 0.4],
        memory_parts_bytes=[
            {"parameters": 17 * GIB, "gradients": 17 * GIB, "optimizer": 20 * GIB, "activations": n * GIB}
            for n in (17, 12, 6, 10)
        ],
        breakdown_s={"compute": 7.9, "tp": 0.9, "dp": 0.14, "bubble": 0.8, "optimiser": 0.1},
    )
    return Plan(
        model=ModelRef(name="llama <70b>", fingerprint="0123abcd"),
        cluster=ClusterRef(gpu="a100-80gb", num_gpus=64, gpus_per_node=8),
        batch=Batch(global_size=64, num_microbatches=16),
        mesh={"dp": 2, "tp": 8},
        inputs=["dp"],
        zero=1,
        precision="bf16",
        blocks=[
            BlockPlan(name="embedding", ops={"embedding/embedding": {"dp": "b", "tp": "v"}}),
            BlockPlan(name="layers.*", repeats=16, ops=LAYER),
            BlockPlan(name="head", ops={}),
        ],
        stages=[
            StagePlan(first=0, last=4, remat={"full": 2}),
            StagePlan(first=5, last=8, remat={"selective": 4}),
            StagePlan(first=9, last=12),
            StagePlan(first=13, last=17),
        ],
        prediction=prediction if predicted else None,
    )
