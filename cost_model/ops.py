"""Roofline of one op on one rank, forward and backward.

    forward  = max(FLOPs / achieved FLOP/s, bytes / achieved bandwidth, elements * transcendental) + launches
    backward = the same over what the gradient computation does

What a matrix product achieves depends on its local shape (``matmul.py``), of each product of the backward on its own;
on a core its bytes add to it. Of a recurrent layer, the products of the steps come one after another. Experts are two
products for each of them, of the rows that it gets on average; where ranks share experts the time is that of the rank
with most rows, as far as it is known how many each expert gets.
FLOPs and bytes are those of the local shard: the rule's FLOPs divided by the ranks that share the work, each
tensor divided by the axes that cut it, and both by the number of microbatches where they carry the batch. Where
ranks share the queries of a causal attention, the time is that of the rank that sees the most keys.

An op is a *contraction* if a factor is in two of its floating point operands and in no result, as ``k`` in
``m k, n k -> m n``. Its backward is one such product for each operand that needs a gradient. Every other op is
bound by the bytes it reads and writes, backward the gradients and what it saved. A view costs nothing
forward; backward it fills the gradient of what it left out. Nothing else is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from autopar.cost_model.experts import Loads, share_of_busiest
from autopar.cost_model.hardware import ITEMSIZE, Device, MatmulRate
from autopar.cost_model.matmul import fraction_of_rate
from autopar.cost_model.products import (
    ITSELF,
    Product,
    factors_of,
    gradient_orders,
    launches_of_recurrence,
    product_of,
    products_of_experts,
    products_of_recurrence,
)
from autopar.cost_model.scans import elements_of_scan, is_scan, launches_of_scan
from autopar.cost_model.seconds import OpTime
from autopar.ir.errors import UnsupportedOp
from autopar.ir.graph import has_gradient_dtype, tensor_operands, tensor_results
from autopar.ir.lowered.attention import QUERIES, lengths_of, sight_of
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule, TensorFactors, factors_of_choice
from autopar.ir.rules import recurrent
from autopar.ir.rules.moe import EXPERTS
from autopar.ir.sequence import Sight, folds_for, imbalance

# Fused attention computes the scores again in its backward: one more product, of the forward's two.
_SCORES_AGAIN = 0.5

# Ops whose first operand is a table of which they read only what they return.
_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "index.Tensor"})

# Composite ops that run as several kernels over their first operand: bytes an element of it that forward and
# backward move beyond one read each way. Cross entropy widens to float32, normalises and then picks.
_EXTRA_PASSES = {"cross_entropy": (12.0, 16.0)}

# The same on a core, where there is no kernel for all of it: squares, their mean, the two products; backward seven
# kernels that read or write 19 tensors. How many launches that takes.
_EXTRA_PASSES_ON_CPU = {"rms_norm": (20.0, 64.0)}
_LAUNCHES_ON_CPU = {"rms_norm": (6, 9)}

# Ops that take an exponential, a hyperbolic tangent or the like of each element of their first operand: time of an
# element, forward and backward, over that of a GELU by tanh. Measured on a core with AVX-512, where most of them are
# vectors and hardly take longer than their memory. Another GELU than that takes the second figure.
_TRANSCENDENTAL = {
    "cross_entropy": 0.5,
    "elu": 0.7,
    "erf": 0.8,
    "exp": 0.25,
    "gelu": 1.0,
    "log": 0.7,
    "log_softmax": 0.5,
    "mish": 2.5,
    "sigmoid": 0.3,
    "silu": 0.3,
    "softmax": 0.4,
    "softplus": 0.75,
    "tanh": 0.3,
}
_GELU_BY_ERF = 0.4

# Kernels around the two products of experts, forward and backward; and those of a product of one expert where there is
# no kernel for all of them (``ir.experts`` has one in bf16 on GPUs): selecting rows and weight, transposing, product,
# and backward both gradients.
_AROUND_EXPERTS = (12, 12)
_OF_AN_EXPERT = (4, 8)

# Stands for all factors of an op: a tensor "over" it is divided wherever the work is.
_WORK = "*"

# Ops with an alias annotation that nevertheless copy.
_COPIES = frozenset({"contiguous", "to", "_to_copy"})

# Views without an alias annotation.
_VIEWS = frozenset({"_unsafe_view", "reshape"})


def op_name(node: fx.Node) -> str:
    """Short name of an op: ``linear`` for ``aten.linear.default``, ``attention`` for ``autopar.ir.ops.attention``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return getattr(target, "__name__", str(target))


def is_view(node: fx.Node) -> bool:
    """Whether an op only names the data of its operand anew."""
    name = op_name(node)
    if name in _VIEWS:
        return True
    if name in _COPIES or not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_attention(node: fx.Node) -> bool:
    return op_name(node) in ("attention", "scaled_dot_product_attention")


def is_contraction(node: fx.Node, rule: FactorRule) -> bool:
    """Whether the op multiplies two floating point operands over a common factor that no result has."""
    return bool(_contracted(node, rule))


def _contracted(node: fx.Node, rule: FactorRule) -> list[int]:
    """Positions of the operands that share a factor which no result has with another one; [] for none."""
    kept = factors_of(rule.results)
    own = {
        position: {f for dim in rule.operands[position] for f in dim} - kept
        for position, operand in enumerate(tensor_operands(node))
        if has_gradient_dtype(operand.meta["val"])
    }
    return [p for p, lost in own.items() if any(lost & other for q, other in own.items() if q != p)]


def training_flops(node: fx.Node, rule: FactorRule, needs_grad: AbstractSet[fx.Node] | None = None) -> float:
    """Floating point operations of one op in a step on the whole batch: forward, and the gradients that are wanted.

    What a kernel computes a second time is not counted. needs_grad: as in ``OpCost.of``.
    """
    contracted = _contracted(node, rule)
    passes = _gradient_passes(node, contracted, _wanted(node, needs_grad))
    return _flops(rule, contracted) * (1.0 + passes)


def _flops(rule: FactorRule, contracted: Sequence[int]) -> float:
    """Of forward."""
    return rule.flops if rule.flops or not contracted else 2.0 * prod(rule.sizes.values())


def _wanted(node: fx.Node, needs_grad: AbstractSet[fx.Node] | None) -> list[int]:
    """Positions of the operands whose gradient is computed."""
    if needs_grad is not None and node not in needs_grad:
        return []
    return [
        position
        for position, operand in enumerate(tensor_operands(node))
        if has_gradient_dtype(operand.meta["val"]) and (needs_grad is None or operand in needs_grad)
    ]


def _gradient_passes(node: fx.Node, contracted: Sequence[int], wanted: Sequence[int]) -> float:
    """FLOPs of the gradients of the ``wanted`` operands, over those of forward."""
    if not wanted:
        return 0.0
    if is_attention(node):
        # Queries by keys, and that by values. Backward of the second: values, and scores for any other operand.
        queries, keys, values = (position in wanted for position in range(3))
        scores = any(position != 2 for position in wanted)
        return 0.5 * (queries + keys + values + scores)
    # A composite of several products (experts) has more operands, but still two products for each one.
    return min(2.0, len(set(contracted) & set(wanted))) if contracted else 2.0


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Bytes of a tensor of the whole batch, the factors it runs over, and what backward does with it."""

    num_bytes: float
    factors: frozenset[str]
    carries_batch: bool

    def local(self, degrees: dict[str, int], num_microbatches: int) -> float:
        divisor = num_microbatches if self.carries_batch else 1
        for factor, degree in degrees.items():
            if factor in self.factors:
                divisor *= degree
        return self.num_bytes / divisor


@dataclass(frozen=True, slots=True)
class OpCost:
    """Everything about an op that its time depends on, so that each assignment takes microseconds.

    read, written: tensors that forward reads and writes; backward_read, backward_written: the same of backward.
    products: of matrices, () for an op that is none and no mixture of experts; gradients: for each of them the products
    that give those of its operands. joint: choices that send rows to their experts. launches: of kernels forward and
    backward, beside num_loops products that are computed expert by expert.
    is_contraction: selective rematerialisation keeps the results of these (matmuls, convolutions, attention).
    elements: of the first operand, weighted, where a transcendental function of them is taken.
    sight, lengths: of an attention, who sees whom and how many queries and keys there are. balanced: whether its
    sequence is folded so that all ranks see alike much. loads: rows that experts got, by layer.
    """

    name: str
    device: Device
    rate: MatmulRate
    free: bool
    free_backward: bool
    flops: float
    backward_flops: float
    carries_batch: bool
    read: tuple[_Tensor, ...]
    written: tuple[_Tensor, ...]
    backward_read: tuple[_Tensor, ...]
    backward_written: tuple[_Tensor, ...]
    products: tuple[Product, ...]
    gradients: tuple[tuple[int, ...], ...]
    joint: frozenset[str]
    is_contraction: bool
    sizes: dict[str, int]
    batch_factor: str | None
    efficiency: float
    launches: tuple[int, int]
    num_loops: int = 0
    elements: _Tensor | None = None
    sight: Sight | None = None
    lengths: tuple[int, int] = (1, 1)
    balanced: bool = False
    loads: Loads = ()

    @classmethod
    def of(
        cls,
        node: fx.Node,
        rule: FactorRule | None,
        device: Device,
        *,
        precision: str = "fp32",
        batch_factor: str | None = None,
        needs_grad: AbstractSet[fx.Node] | None = None,
        balanced: bool = False,
        loads: Loads = (),
    ) -> OpCost:
        """Measure ``node``.

        precision: of compute (fp32, bf16 or fp16): what float32 tensors of the capture become. batch_factor: the
        factor of the rule that is the batch, None if the op does not carry it. needs_grad: tensors that a
        gradient flows through (``ir.gradient_flow``), the op among them; every floating point one if not given.
        Raises UnsupportedOp for an op without a rule.
        """
        if rule is None:
            raise UnsupportedOp(
                f"no cost for {node.target} ({node.name}): it has no factor rule"
                f"\n  at: {node.meta.get('source', 'unknown line')}"
            )
        operands, results = tensor_operands(node), tensor_results(node)
        read = [
            _tensor(o.meta["val"], f, precision, batch_factor) for o, f in zip(operands, rule.operands, strict=True)
        ]
        written = [_tensor(r, f, precision, batch_factor) for r, f in zip(results, rule.results, strict=True)]
        differentiable = _wanted(node, needs_grad)
        flowing = [t for r, t in zip(results, written, strict=True) if has_gradient_dtype(r)]
        gradients = [read[position] for position in differentiable]
        contracted = _contracted(node, rule)
        attention = is_attention(node)
        free = is_view(node)
        if op_name(node) in _LOOKUPS and read:
            read[0] = written[0]
        elif op_name(node) == "embedding_bag":
            rows = operands[1].meta["val"].numel() / max(results[0].shape[0], 1)
            read[0] = replace(written[0], num_bytes=rows * written[0].num_bytes)
        forward_extra, backward_extra = _extra_passes(node, rule, device, precision, batch_factor)
        flops = _flops(rule, contracted)
        rate = device.matmul_rate(precision)
        passes = _gradient_passes(node, contracted, differentiable)
        if attention and passes:
            passes += _SCORES_AGAIN
        experts = op_name(node) == "moe"
        in_steps = recurrent.is_recurrent(node)
        if in_steps:
            products = products_of_recurrence(node, rule)
        else:
            products = (
                products_of_experts(rule) if experts else () if attention else product_of(rule, contracted, flops)
            )
        launches = (1, max(1, len(gradients)) if contracted else 1)
        if in_steps or is_scan(node):
            launches = launches_of_scan(node) if is_scan(node) else launches_of_recurrence(node)
        if device.is_cpu:
            launches = _LAUNCHES_ON_CPU.get(op_name(node), launches)
        same_size = all(t.num_bytes == g.num_bytes for t in flowing for g in gradients) and len(flowing) == 1
        return cls(
            name=op_name(node),
            device=device,
            rate=rate,
            free=free,
            free_backward=not gradients or not flowing or (free and same_size),
            flops=flops,
            backward_flops=flops * passes,
            carries_batch=batch_factor is not None,
            read=(*read, *forward_extra),
            written=tuple(written),
            backward_read=tuple(flowing if free else [*flowing, *read, *backward_extra]),
            backward_written=tuple(gradients),
            products=products,
            gradients=gradient_orders(contracted, differentiable) if products else (),
            joint=frozenset(rule.joint),
            is_contraction=bool(contracted),
            sizes=dict(rule.sizes),
            batch_factor=batch_factor,
            efficiency=rate.attention_efficiency if attention else rate.efficiency,
            launches=_AROUND_EXPERTS if experts else launches,
            num_loops=len(products) if experts and (device.is_cpu or precision != "bf16") else 0,
            elements=_elements(node, rule, batch_factor),
            sight=sight_of(node) if attention and QUERIES in rule.sizes else None,
            lengths=lengths_of(rule) if attention and QUERIES in rule.sizes else (1, 1),
            balanced=balanced,
            loads=loads,
        )

    def time(self, assignment: Assignment, mesh: Mesh, num_microbatches: int = 1) -> OpTime:
        """Seconds of one microbatch on one rank. Never negative; positive unless the op is a view."""
        degrees, sent = {_WORK: 1}, 1
        work = num_microbatches if self.carries_batch else 1
        for choice, axis in zip(assignment, mesh.axes, strict=True):
            if choice in self.joint:
                sent *= axis.size
            for factor in factors_of_choice(choice):
                degrees[factor] = degrees.get(factor, 1) * axis.size
            if choice is not None and choice[0] != "+":
                work *= axis.size
                degrees[_WORK] *= axis.size
        one_by_one = self.num_loops * self.sizes.get(EXPERTS, 0) / degrees.get(EXPERTS, 1)
        launch, launch_back = (
            self.device.kernel_launch_s * (around + one_by_one * own)
            for around, own in zip(self.launches, _OF_AN_EXPERT, strict=True)
        )
        most = self._largest_share(degrees)
        busy = most / work / (self.rate.peak_flops * self.efficiency)
        computing, computing_back = self.flops * busy, self.backward_flops * busy
        if self.products:
            computing = computing_back = 0.0
            for product in self.products:
                shape = product.local_shape(self.sizes, degrees, self.batch_factor, num_microbatches, sent)
                steps = product.steps
                computing += product.flops * busy / self._fraction(shape, ITSELF, steps)
                computing_back += sum(
                    product.flops * busy / self._fraction(shape, order, steps) for order in self.gradients
                )
        forward = backward = functions = 0.0
        if self.elements is not None:
            functions = self.device.transcendental_s * self.elements.local(degrees, num_microbatches)
        if not self.free:
            moved = self._moved((*self.read, *self.written), degrees, num_microbatches, most)
            forward = self._together(computing, self.device.memory_seconds(moved), functions) + launch
        if not self.free_backward:
            tensors = (*self.backward_read, *self.backward_written)
            moved = self._moved(tensors, degrees, num_microbatches, most)
            backward = self._together(computing_back, self.device.memory_seconds(moved), functions) + launch_back
        return OpTime(forward, backward)

    def written_bytes(self, assignment: Assignment, mesh: Mesh, num_microbatches: int) -> float:
        """Bytes of the results of one microbatch on one rank."""
        degrees: dict[str, int] = {}
        for choice, axis in zip(assignment, mesh.axes, strict=True):
            for factor in factors_of_choice(choice):
                degrees[factor] = degrees.get(factor, 1) * axis.size
        return sum(t.local(degrees, num_microbatches) for t in self.written)

    def _largest_share(self, degrees: dict[str, int]) -> float:
        """Work of the rank that has most, over the mean."""
        if EXPERTS in self.sizes:
            return share_of_busiest(self.loads, self.sizes[EXPERTS], degrees.get(EXPERTS, 1))
        count = degrees.get(QUERIES, 1)
        if self.sight is None or count == 1:
            return 1.0
        folds = folds_for(self.lengths, count, balanced=self.balanced)
        return imbalance(self.sight, self.lengths, folds, count)

    def _moved(
        self, tensors: tuple[_Tensor, ...], degrees: dict[str, int], num_microbatches: int, most: float
    ) -> float:
        """Bytes of a microbatch on the rank that has most to do."""
        return sum(t.local(degrees, num_microbatches) * (most if _WORK in t.factors else 1.0) for t in tensors)

    def _together(self, computing: float, moving: float, functions: float) -> float:
        if self.products and self.device.is_cpu:
            return computing + moving
        return max(computing, moving, functions)

    def _fraction(self, shape: tuple[float, ...], order: tuple[int, ...], steps: int) -> float:
        rows, *others = (shape[number] for number in order)
        return fraction_of_rate(self.device.tiling, rows / steps if order[0] == 0 else rows, *others)


def op_time(
    node: fx.Node,
    rule: FactorRule | None,
    assignment: Assignment,
    mesh: Mesh,
    device: Device,
    *,
    precision: str = "fp32",
    batch_factor: str | None = None,
    num_microbatches: int = 1,
    needs_grad: AbstractSet[fx.Node] | None = None,
) -> OpTime:
    """Seconds of one microbatch of one op on one rank. ``OpCost`` is the form for many assignments."""
    cost = OpCost.of(node, rule, device, precision=precision, batch_factor=batch_factor, needs_grad=needs_grad)
    return cost.time(assignment, mesh, num_microbatches)


def compute_itemsize(dtype: torch.dtype, precision: str) -> int:
    """Bytes of an element that the capture has as ``dtype``: float32 becomes the precision of compute."""
    return ITEMSIZE[precision] if dtype == torch.float32 else dtype.itemsize


def _tensor(value: torch.Tensor, factors: TensorFactors, precision: str, batch_factor: str | None) -> _Tensor:
    names = frozenset(f for dim in factors for f in dim)
    num_bytes = value.numel() * compute_itemsize(value.dtype, precision)
    return _Tensor(float(num_bytes), names, batch_factor is not None and batch_factor in names)


def _elements(node: fx.Node, rule: FactorRule, batch_factor: str | None) -> _Tensor | None:
    weight = _TRANSCENDENTAL.get(op_name(node))
    if weight is None:
        return None
    if op_name(node) == "gelu" and node.kwargs.get("approximate", "none") != "tanh":
        weight = _GELU_BY_ERF
    names = frozenset(f for dim in rule.operands[0] for f in dim)
    return _Tensor(weight * tensor_operands(node)[0].meta["val"].numel(), names, batch_factor in names)


def _extra_passes(
    node: fx.Node, rule: FactorRule, device: Device, precision: str, batch_factor: str | None
) -> tuple[tuple[_Tensor, ...], tuple[_Tensor, ...]]:
    """What the kernels inside a composite op move, forward and backward."""
    if op_name(node) == "moe":
        return _expert_passes(node, precision, batch_factor)
    if is_scan(node):
        width = compute_itemsize(tensor_results(node)[0].dtype, precision)
        first, second = (
            _Tensor(n * width, frozenset({_WORK}), batch_factor is not None) for n in elements_of_scan(node)
        )
        return (first,), (second,)
    widths = _EXTRA_PASSES.get(op_name(node)) or (_EXTRA_PASSES_ON_CPU.get(op_name(node)) if device.is_cpu else None)
    if widths is None:
        return (), ()
    numel = tensor_operands(node)[0].meta["val"].numel()
    names = frozenset(f for dim in rule.operands[0] for f in dim)
    forward, backward = (_Tensor(numel * width, names, batch_factor in names) for width in widths)
    return (forward,), (backward,)


def _expert_passes(
    node: fx.Node, precision: str, batch_factor: str | None
) -> tuple[tuple[_Tensor, ...], tuple[_Tensor, ...]]:
    """Rows of tokens on their way through the experts: gathered, two products, activation, weighted, added up."""
    x, index, _, up, down = (operand.meta["val"] for operand in tensor_operands(node)[:5])
    hidden, wide, inner = x.shape[-1], up.shape[1], down.shape[2]
    gate = wide - inner
    row = index.numel() * compute_itemsize(x.dtype, precision)
    # Elements that each kernel reads and writes, backward with both gradients of each product.
    forward = 9 * hidden + wide + 3 * inner + 3 * gate
    backward = 13 * hidden + 2 * wide + 5 * inner + 5 * gate
    work = frozenset({_WORK})
    first, second = (_Tensor(float(row * width), work, batch_factor is not None) for width in (forward, backward))
    return (first,), (second,)
