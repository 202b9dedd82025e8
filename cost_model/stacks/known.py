"""The software stacks that are known, by name."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from autopar.cost_model.stacks import known_memory
from autopar.cost_model.stacks.attention_kernels import (
    CUDNN_BLACKWELL,
    CUDNN_BLACKWELL_ULTRA,
    CUDNN_HOPPER,
    FLASH1_AMPERE,
    FLASH2_AMPERE,
    FLASH2_HOPPER,
    TRITON_AMPERE,
    TRITON_HOPPER,
)
from autopar.cost_model.stacks.attention_rate import AttentionKernel
from autopar.cost_model.stacks.stack import Architecture, Stack
from autopar.ir.errors import InvalidCluster
from autopar.ir.redistribution import Collective
from autopar.ir.schedule import Schedule, splits_backward

# Norms that a compiler puts into a kernel with pointwise ops.
NORMS = frozenset({"rms_norm", "layer_norm", "fused_rms_norm"})

# Bytes an element of logits, float32 from the first kernel on: one H100 took 4.5 and 4.6 ms for 4,096 x 128,256 of
# bf16, an H200 3.6 and 3.4 (``benchmarks/kernels.py``); compiled, 0.9 and 0.9.
_EAGER_LOSS, _COMPILED_LOSS = (21.0, 20.0), (2.0, 0.0)
# Norms of torch on the same devices took 1.4 to 1.5 times as long as their bytes, backward 2.2 to 2.6 times.
_EAGER_NORM = (1.8, 8.0)
# Grouped products of torch on the H100: 8 experts of 2,048 rows at 0.82 of the rate of one product, 16 to 128 of 256
# and 512 rows at 0.63 to 0.68.
_GROUPED = 0.75
# A guess, not measured: cuBLAS on several streams, one product after another.
_GROUPED_BY_CUBLAS = 0.85
# Biases of experts, bytes an element of what each product gives. Compiled, they are added in the kernel of the
# activation and of the weights; their gradients read what comes in once.
_COMPILED_BIASES = (0.0, 2.0), (0.0, 2.0)
# Megatron-Core adds the first in its product. The second it adds expert by expert, weighted, in torch, and puts the
# rows together again (``TEGroupedMLP._apply_bias``, megatron/core/transformer/moe/experts.py). Weights are float32, so
# that makes float32 rows: forward a product written (4), a sum (2 + 4 + 4), the rows joined (4 + 4), and cast (4 + 2);
# backward the cast (2 + 4), the gradient of the rows in 16 bits (4 + 2) and joined (2 + 2), those of bias and weight
# multiplied (2 x (4 + 4)) and summed (2 x 4).
_MEGATRON_BIASES = (0.0, 0.0), (28.0, 40.0)
# Of these, those that an expert has for itself: the product and the sum; backward a cast, and of bias and weight a
# product and a sum each.
_LAUNCHES_OF_BIAS = (2, 5)
# A loss over vocabulary-parallel logits in float32: maximum, exponentials and their sum, and the softmax in place.
_VOCABULARY_PARALLEL_LOSS = {"cross_entropy": (12.0, 16.0)}

# Queries and keys as complex numbers, for which torch.compile makes no kernels (pytorch/torchtitan, issue 15): cast to
# float32 (2 + 4), multiplied (4 + 4), and cast back (4 + 2), where one kernel would read and write 16 bits.
_COMPLEX_ROTATION = (16.0, 16.0)

# Attention of stacks that take cuDNN's where it is the faster, and of those that call FlashAttention-2.
_CUDNN: dict[Architecture, AttentionKernel] = {
    "ampere": FLASH2_AMPERE,
    "hopper": CUDNN_HOPPER,
    "blackwell": CUDNN_BLACKWELL,
    "blackwell-ultra": CUDNN_BLACKWELL_ULTRA,
}
_FLASH2: dict[Architecture, AttentionKernel] = {**_CUDNN, "hopper": FLASH2_HOPPER}

# Of pipelines: of Megatron, whose releases have these two, and of torch.distributed.pipelining.
_MEGATRONS: tuple[Schedule, ...] = ("1f1b", "interleaved")
_TORCHS: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")

AUTOPAR = Stack(
    name="autopar",
    memory=known_memory.AUTOPAR,
    attention=_CUDNN,
    extra_bytes={"cross_entropy": _EAGER_LOSS, "rms_norm": _EAGER_NORM, "layer_norm": _EAGER_NORM},
    grouped=_GROUPED,
    gathers_narrow=frozenset({"weights", "activations"}),
    any_order=True,
    keeps_any=True,
    keeps_on_host=True,
    two_queues="cpu",
    why="torch 2.11 takes cuDNN's attention on an H100 and an H200 of itself (benchmarks/kernels.py), "
    "else FlashAttention-2",
)
COMPILED = replace(
    AUTOPAR,
    name="autopar-compiled",
    fuses=True,
    reductions=NORMS,
    extra_bytes={"cross_entropy": _COMPILED_LOSS},
    expert_biases=_COMPILED_BIASES,
    keeps_on_host=False,
    two_queues="none",
    schedules=tuple(name for name in AUTOPAR.schedules if not splits_backward(name)),
    any_order=False,
    why="the same, with compile=True: torch.compile makes kernels of pointwise ops and norms, but not of casts, as "
    "it does not look into the backward of an 8-bit layer",
)
MEGATRON_LM = Stack(
    name="megatron-lm-2021",
    schedules=_MEGATRONS,
    memory=known_memory.MEGATRON_LM,
    attention={"volta": FLASH1_AMPERE, "ampere": FLASH2_AMPERE, "hopper": FLASH2_HOPPER},
    fuses=True,
    merges=True,
    extra_bytes=_VOCABULARY_PARALLEL_LOSS,
    grouped=_GROUPED,
    why="kernels for GELU with its bias, for dropout with bias and residual, and for scale and mask "
    "(Narayanan et al. 2021, section 4.2)",
)
MEGATRON_LM_2022 = replace(
    MEGATRON_LM,
    name="megatron-lm-2022",
    adds_in_products=True,
    why="the same, with a product that adds to float32 gradients (github.com/NVIDIA/Megatron-LM: "
    "fused_kernels/fused_weight_gradient_dense, later apex; --no-gradient-accumulation-fusion is without)",
)
ZERO_BUBBLE = replace(
    MEGATRON_LM_2022,
    name="zero-bubble-2023",
    schedules=(*_MEGATRONS, "zb-h1", "zb-2p", "zb-v"),
    memory=known_memory.ZERO_BUBBLE,
    why="a copy of Megatron-LM of 2023 (github.com/sail-sg/zero-bubble-pipeline-parallelism)",
)
MEGATRON_CORE = Stack(
    name="megatron-core-2024",
    schedules=_MEGATRONS,
    memory=known_memory.MEGATRON_CORE,
    attention=_CUDNN,
    fuses=True,
    merges=True,
    extra_bytes=_VOCABULARY_PARALLEL_LOSS,
    grouped=_GROUPED_BY_CUBLAS,
    expert_by_expert=True,
    adds_in_products=True,
    gathers_ahead=True,
    casts_once=True,
    local_scales=True,
    gathers_narrow=frozenset({"activations"}),
    overlaps=frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER}),
    why="Transformer Engine takes cuDNN's attention on Hopper and later, FlashAttention-2 before; with user buffers it "
    "cuts a tensor-parallel product into pieces, one of which is communicated while another is computed (recalled: its "
    "documentation); rotary embedding, SwiGLU and dropout with residual are kernels of their own; "
    "products add to float32 gradients (gradient_accumulation_fusion); experts are its layers, one by one or grouped, "
    "as other products are (SequentialMLP and TEGroupedMLP of Megatron-Core); its norms write 8 bits, which is what "
    "tensor-parallel ranks gather, and gradients are cast before they are gathered (ln_out of layernorm_linear.py and "
    "grad_output_preprocess of base.py, transformer_engine/pytorch/module); between virtual stages Megatron's schedule "
    "calls param_sync_func for the next model chunk (megatron/core/pipeline_parallel/schedules.py)",
)
MEGATRON_CORE_FLASH = replace(
    MEGATRON_CORE,
    name="megatron-core-2024-flash",
    attention=_FLASH2,
    why="the same with FlashAttention-2 on Hopper too (NVTE_FUSED_ATTN=0: the default of NeMo's launcher in 2024, "
    "launcher_scripts/conf/config.yaml of NVIDIA/NeMo-Framework-Launcher)",
)
MEGATRON_CORE_2025 = replace(
    MEGATRON_CORE,
    name="megatron-core-2025",
    memory=known_memory.MEGATRON_CORE_2025,
    extra_bytes={"cross_entropy": _COMPILED_LOSS},
    expert_biases=_MEGATRON_BIASES,
    launches_of_bias=_LAUNCHES_OF_BIAS,
    why="the same, with cross entropy in one kernel of Transformer Engine (recalled: releases of Megatron-Core), and "
    "biases of experts",
)
MEGATRON_CORE_OVERLAP = replace(
    MEGATRON_CORE_2025,
    name="megatron-core-2025-overlap",
    hides_dispatch=True,
    why="the same, with the all-to-alls of one microbatch beside the compute of another, between virtual stages "
    "(overlap_moe_expert_parallel_comm; moe_a2a_overlap in scripts/performance of Megatron-Bridge)",
)
MEGATRON_CORE_DEEPEP = replace(
    MEGATRON_CORE_OVERLAP,
    name="megatron-core-2025-deepep",
    sends_once=True,
    why="the same, and tokens dispatched by DeepEP: between nodes each is sent once to a node, and from there over "
    "NVLink (deepseek-ai/DeepEP README; moe_flex_dispatcher_backend of Megatron-Core)",
)
TORCHTITAN = Stack(
    name="torchtitan-2024",
    schedules=_TORCHS,
    memory=known_memory.TORCHTITAN,
    attention=_FLASH2,
    fuses=True,
    reductions=NORMS,
    extra_bytes={"cross_entropy": _COMPILED_LOSS},
    rotation_bytes=_COMPLEX_ROTATION,
    expert_biases=_COMPILED_BIASES,
    grouped=_GROUPED,
    fuses_casts=True,
    local_scales=True,
    gathers_narrow=frozenset({"weights", "activations"}),
    why="blocks and loss are compiled; scaled_dot_product_attention of torch 2.6 takes FlashAttention-2, after cuDNN's "
    "had been put behind it in 2.5.1 (recalled: release notes of torch 2.5.1); scaling by tensor is with "
    "float8 all-gathers of weights (docs/float8.md: enable_fsdp_float8_all_gather and precompute_float8_dynamic_scale_"
    "for_fsdp), and of activations and gradients over tensor-parallel ranks (the same; gradients recalled: torchao's "
    "float8_tensor_parallel.py)",
)
TORCHTITAN_EAGER = replace(
    TORCHTITAN,
    name="torchtitan-2024-eager",
    memory=known_memory.TORCHTITAN_EAGER,
    fuses=False,
    reductions=frozenset(),
    fuses_casts=False,
    rotation_bytes=(0.0, 0.0),
    extra_bytes=AUTOPAR.extra_bytes,
    expert_biases=AUTOPAR.expert_biases,
    why="the same without torch.compile",
)
TORCHTITAN_ASYNC = replace(
    TORCHTITAN,
    name="torchtitan-2024-async-tp",
    overlaps=MEGATRON_CORE.overlaps,
    why="the same with asynchronous tensor parallelism: all-gathers and reduce-scatters in pieces beside products",
)
NANOTRON = Stack(
    name="nanotron",
    schedules=("gpipe", "1f1b"),
    memory=known_memory.NANOTRON,
    attention=_FLASH2,
    merges=True,
    extra_bytes={**AUTOPAR.extra_bytes, "rms_norm": (0.0, 2.0)},
    grouped=_GROUPED,
    why="nanotron calls flash_attn, version 2, and its norm in Triton; one product of queries, keys and values, one of "
    "gate and up; nothing is compiled (recalled: src/nanotron/models/llama.py)",
)
LLM_FOUNDRY = Stack(
    name="llm-foundry-2023",
    memory=known_memory.LLM_FOUNDRY,
    attention={**_CUDNN, "ampere": TRITON_AMPERE, "hopper": TRITON_HOPPER},
    merges=True,
    extra_bytes=_VOCABULARY_PARALLEL_LOSS,
    grouped=_GROUPED,
    local_scales=True,
    why="torch 1.13.1 with FlashAttention in Triton (scripts/train/benchmarking); nothing is compiled",
)
MAXTEXT = Stack(
    name="maxtext-2024",
    memory=known_memory.MAXTEXT,
    attention=_CUDNN,
    fuses=True,
    reductions=NORMS,
    extra_bytes={"cross_entropy": _COMPILED_LOSS},
    expert_biases=_COMPILED_BIASES,
    grouped=_GROUPED,
    fuses_casts=True,
    local_scales=True,
    why="XLA makes kernels of pointwise ops and norms; attention is cuDNN's (recalled: attention=cudnn_flash_te)",
)

STACKS = {
    stack.name: stack
    for stack in (
        *(AUTOPAR, COMPILED, MEGATRON_LM, MEGATRON_LM_2022, ZERO_BUBBLE, MEGATRON_CORE, MEGATRON_CORE_2025),
        MEGATRON_CORE_FLASH,
        MEGATRON_CORE_OVERLAP,
        MEGATRON_CORE_DEEPEP,
        *(TORCHTITAN, TORCHTITAN_EAGER, TORCHTITAN_ASYNC, NANOTRON, LLM_FOUNDRY, MAXTEXT),
    )
}


def find_stack(name: str) -> Stack:
    """The stack called ``name``. Raises InvalidCluster that lists what there is."""
    if name in STACKS:
        return STACKS[name]
    close = get_close_matches(name, STACKS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InvalidCluster(f"unknown software stack {name!r}{hint}\n  known: {', '.join(STACKS)}")
