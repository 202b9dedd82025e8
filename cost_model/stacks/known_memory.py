"""What the known stacks keep in memory. The facts were read in documentation and source code; the rest says so."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model.stacks.memory import LossMemory, StackMemory

# Share of the live activations that the caching allocator loses to fragmentation and rounding: what it has reserved at
# the peak less what is allocated, 5 to 15 % of all (an H100, eager kernels of many sizes).
_EAGER = 0.15
# Assumed, no measurement: kernels that are fused allocate fewer sizes, and buffers of the state none.
_FUSED = 0.05

# Fitted to the 26 published peaks of nanotron: tensors that asynchronous collectives read on a stream of their own are
# not given out again before the device has caught up with the host.
_STREAMS = 0.25

AUTOPAR = StackMemory(
    divides=True,
    releases_early=True,
    fragmentation=_EAGER,
    why="measured: benchmarks/memory.py, tests/runtime/test_memory_held.py, benchmarks/single_gpu.py",
)

# Softmax in float32, rewritten in place to the gradient; forward the logits as they came, in float32, and those.
_IN_PLACE = LossMemory(kept=4.0, working=6.0)
MEGATRON_LM = StackMemory(
    lasting_gradients=True,
    narrow_gradients=frozenset({"fp16"}),
    regathers=True,
    loss=_IN_PLACE,
    fragmentation=_FUSED,
    why="documentation of Megatron-Core's distributed optimiser: bf16 parameters with float32 gradients take 18 bytes "
    "each, 6 + 12/d with it, fp16 parameters with fp16 gradients 20 and 4 + 16/d, in contiguous buffers; its "
    "column-parallel layer keeps a rank's part of a sequence and gathers it again in backward (Korthikanti et al. "
    "2022, section 4.2.2); softmax of vocabulary-parallel logits in place, as in core/tensor_parallel/cross_entropy.py",
)
MEGATRON_CORE = replace(
    MEGATRON_LM,
    narrow_gradients=frozenset({"fp16", "bf16"}),
    recomputes=frozenset({"silu"}),
    why=MEGATRON_LM.why
    + "; SwiGLU as one kernel keeps its input alone (core/fusions/fused_bias_swiglu.py); NeMo's and "
    "Megatron-Bridge's recipes for performance have grad_reduce_in_fp32 off, so gradients have 16 bits",
)
MEGATRON_CORE_2025 = replace(
    MEGATRON_CORE,
    loss=LossMemory(kept=2.0, working=2.0),
    why=MEGATRON_CORE.why + "; the fused cross entropy writes the gradient over the logits (recalled)",
)
ZERO_BUBBLE = replace(
    MEGATRON_LM,
    releases_early=True,
    first_delays=False,
    why=MEGATRON_LM.why
    + "; a backward stores, for each product, what it read and the gradient that came (WeightGradStore "
    "of github.com/sail-sg/zero-bubble-pipeline-parallelism), and autograd releases the rest",
)
# The loss of torch over whole logits: log probabilities, their gradient, and that of the logits, all in float32. The
# memory of the logits in 16 bits stays reserved beside them, as nothing else that is allocated has its size (assumed).
_WHOLE = LossMemory(kept=4.0, working=10.0)
TORCHTITAN = StackMemory(
    recomputes=frozenset({"silu"}),
    loss=_WHOLE,
    fragmentation=_EAGER,
    why="FSDP2 shards float32 parameters and reduces gradients in float32 (its defaults in torchtitan); torch.compile "
    "makes pointwise results of a block again in backward, the loss is not compiled with the blocks and is of whole "
    "logits (chunks came with its pull request 996 of 2025)",
)
TORCHTITAN_EAGER = replace(TORCHTITAN, recomputes=frozenset(), why=TORCHTITAN.why + "; without torch.compile")
NANOTRON = StackMemory(
    lasting_gradients=True,
    buckets=True,
    regathers=True,
    loss=_IN_PLACE,
    fragmentation=_STREAMS,
    why="optim/gradient_accumulator.py: one float32 buffer of the gradients of all parameters, with ZeRO-1 too, beside "
    "the buckets of DistributedDataParallel; parallel/tensor_parallel/functional.py: softmax in place, and a gathered "
    "sequence is gathered again in backward (tp_recompute_allgather, on unless it is turned off)",
)
LLM_FOUNDRY = StackMemory(
    loss=LossMemory(kept=2.0, working=2.0),
    fragmentation=_EAGER,
    why="FSDP of torch with float32 parameters; the loss is FlashAttention's, which keeps logits as they came and "
    "makes their gradient in 16 bits (recalled: fused_crossentropy, the default of its models)",
)
MAXTEXT = StackMemory(
    recomputes=frozenset({"silu"}),
    loss=LossMemory(kept=4.0, working=4.0),
    fragmentation=0.0,
    why="XLA allots all buffers of a step beforehand, and makes pointwise results again (assumed)",
)
