"""What the kernels of a training step take on one GPU, and what the cost model says that they take.

    python benchmarks/kernels.py [--only attention,matmul] [--seconds 200] [--json kernels.json]

Each case is a module of one or a few ops in bf16, captured and normalised as a model is; its ops are priced for the
device of the catalogue, without a profile, and the captured graph is timed: forward alone, then forward and backward,
of which the difference is the backward. Rates are of what the case is bound by: FLOPs of the products, or the bytes
that have to be read and written at least. 8-bit products, copies, and the host's time to issue an op have no price
beside them. On a CPU the cases are small, which shows that they run.

The table is a measurement of a device; nothing is fitted here, and no training run is read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.op_roofline import OpCost
from autopar.cost_model.hardware.cluster import Cluster
from autopar.cost_model.stacks.known import COMPILED
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel, op_nodes
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.plan import Precision
from autopar.ir.rules import rule_for
from autopar.passes.normalise import normalise
from autopar.search.outer.prices import Prices
from autopar.search.problem.workload import Workload

REPEATS, UNTIMED = 8, 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """build: the module. inputs: shapes of its floating inputs. flops, num_bytes: of forward, what its rate counts.

    backend: the attention kernel to run; None: torch chooses. compiled: by torch.compile, and priced so.
    """

    kind: str
    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    flops: float = 0.0
    num_bytes: float = 0.0
    backend: SDPBackend | None = None
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds; NaN where nothing is predicted, or nothing runs backward."""

    kind: str
    name: str
    forward_s: float
    forward_predicted_s: float = math.nan
    backward_s: float = math.nan
    backward_predicted_s: float = math.nan
    rate: str = ""


class Given(nn.Module):
    """A module whose inputs are parameters, so that all of them have a gradient, and are priced so."""

    def __init__(self, module: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.module = module
        self.given = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])

    def forward(self, unread: Tensor) -> Tensor:
        result: Tensor = self.module(*self.given)
        return result


class Attention(nn.Module):
    def __init__(self, *, causal: bool, grouped: bool) -> None:
        super().__init__()
        self.causal, self.grouped = causal, grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.grouped)


class Gate(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Rotary(nn.Module):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class NormOfSum(nn.Module):
    """The residual stream and its norm, both of which are used later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return torch.cat((total, self.norm(total)))


class Loss(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("target", torch.zeros(rows, dtype=torch.long))

    def forward(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), self.target)


def matmuls(small: bool) -> Iterator[Case]:
    """Tokens, columns, depth: of Llama 3 8B and 70B whole and cut by tensor parallelism, experts, a vocabulary."""
    shapes = [
        (8192, 4096, 4096), (8192, 1024, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 8192, 8192),
        (8192, 28672, 8192), (8192, 1792, 4096), (8192, 4096, 1792), (8192, 3584, 8192), (8192, 8192, 3584),
        (8192, 512, 4096), (2048, 4096, 4096), (1024, 14336, 4096), (512, 4096, 14336), (256, 2048, 7168),
        (4096, 5120, 640), (8192, 128256, 4096),
    ]  # fmt: skip
    for rows, columns, depth in [(64, 96, 32)] if small else shapes:
        build = partial(nn.Linear, depth, columns, bias=False)
        name = f"linear {rows} x {columns} x {depth}"
        yield Case(kind="matmul", name=name, build=build, inputs=((rows, depth),), flops=2.0 * rows * columns * depth)


def attentions(small: bool) -> Iterator[Case]:
    """Heads, key and value heads, length, head size of queries and keys and of values."""
    shapes = [
        (32, 8, 2048, 128, 128), (32, 8, 8192, 128, 128), (32, 8, 32768, 128, 128), (8, 1, 131072, 128, 128),
        (32, 32, 8192, 64, 64), (32, 32, 8192, 80, 80), (32, 32, 8192, 96, 96), (16, 16, 8192, 192, 128),
        (16, 16, 8192, 256, 256), (128, 8, 512, 128, 128),
    ]  # fmt: skip
    backends = (None,) if small else (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for heads, groups, length, size, of_values in [(4, 2, 32, 16, 16)] if small else shapes:
        for causal in (True, False) if length == 8192 and size == 128 else (True,):
            for backend in backends:
                flops = 2.0 * heads * length**2 * (size + of_values) * (0.5 if causal else 1.0)
                which = "" if backend is None else f" {backend.name.split('_')[0].lower()}"
                values = f"/{of_values}" if of_values != size else ""
                yield Case(
                    kind="attention",
                    name=f"{heads}/{groups} heads {length} x {size}{values} {'causal' if causal else 'full'}{which}",
                    build=partial(Attention, causal=causal, grouped=groups != heads),
                    inputs=((1, heads, length, size), (1, groups, length, size), (1, groups, length, of_values)),
                    flops=flops,
                    backend=backend,
                )


def streams(small: bool) -> Iterator[Case]:
    """Ops bound by memory, of the sizes of a block of Llama 3 8B, each kernel by itself and compiled."""
    rows, width, inner, classes = (64, 32, 96, 128) if small else (16384, 4096, 14336, 128256)
    heads, size = (2, 16) if small else (32, 128)
    tensor = 2.0 * rows * width
    cases: list[tuple[str, Callable[[], nn.Module], tuple[tuple[int, ...], ...], float]] = [
        ("rms_norm", partial(nn.RMSNorm, width), ((rows, width),), 2 * tensor),
        ("layer_norm", partial(nn.LayerNorm, width), ((rows, width),), 2 * tensor),
        ("residual add", Add, ((rows, width), (rows, width)), 3 * tensor),
        ("silu(gate) * up", Gate, ((rows, inner), (rows, inner)), 3 * 2.0 * rows * inner),
        ("gelu by tanh", partial(nn.GELU, "tanh"), ((rows, inner),), 2 * 2.0 * rows * inner),
        ("norm of a sum", partial(NormOfSum, width), ((rows, width), (rows, width)), 4 * tensor),
        ("rotary", Rotary, ((1, heads, rows, size), (rows, size), (rows, size)), 2 * tensor),
        ("cross entropy in fp32", partial(Loss, rows // 4), ((rows // 4, classes),), 2.0 * rows // 4 * classes),
    ]
    for name, build, inputs, num_bytes in cases:
        shape = " x ".join(map(str, inputs[0]))
        for kind in ("memory", "compiled"):
            compiled = kind == "compiled"
            yield Case(
                kind=kind, name=f"{name} {shape}", build=build, inputs=inputs, num_bytes=num_bytes, compiled=compiled
            )


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``run``."""
    found = []
    for number in range(UNTIMED + REPEATS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            begun = time.perf_counter()
            run()
            seconds = time.perf_counter() - begun
        if number >= UNTIMED:
            found.append(seconds)
    return statistics.median(found)


def priced(case: Case, cluster: Cluster, precision: Precision) -> tuple[CapturedModel, float, float]:
    """A case captured, and what forward and backward of its ops are predicted to take, in seconds."""
    with torch.device("meta"):
        module = Given(case.build(), case.inputs).to(DTYPES[precision])
    captured = normalise(capture(module, torch.zeros(1)))
    if case.compiled:
        cluster = replace(cluster, device=replace(cluster.device, stack=COMPILED))
    prices, mesh = Prices(Workload.of(captured, precision), cluster), Mesh.of(dp=1)
    ops = [prices.ops.time(node, (None,), mesh, 1) for node in op_nodes(captured.graph)]
    return captured, sum(op.forward_s for op in ops), sum(op.backward_s for op in ops)


def measured(case: Case, cluster: Cluster, device: torch.device, precision: Precision) -> Row:
    """A case priced and timed."""
    captured, forward_predicted_s, backward_predicted_s = priced(case, cluster, precision)
    kind = nullcontext() if case.backend is None else sdpa_kernel(case.backend)
    values = {node.name: node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"}
    given = [
        torch.randn(value.shape, device=device, dtype=value.dtype).requires_grad_(name in captured.parameters)
        if value.is_floating_point()
        else torch.zeros(value.shape, device=device, dtype=value.dtype)
        for name, value in values.items()
    ]
    wanted = [tensor for tensor in given if tensor.requires_grad]
    torch.compiler.reset()
    graph = torch.compile(captured.graph_module) if case.compiled else captured.graph_module

    def forward() -> Tensor:
        return cast("Tensor", graph(*given)[0])

    with kind:
        ones = torch.ones_like(forward())

        def both() -> None:
            torch.autograd.grad(forward(), wanted, ones)

        with torch.no_grad():
            alone = timed(forward, device)
        together = timed(both, device)
    backward = together - alone
    rates = []
    if case.flops:
        passes = 2.5 if case.kind == "attention" else 2.0
        rates = [case.flops / alone / 1e12, passes * case.flops / backward / 1e12]
    elif case.num_bytes:
        rates = [case.num_bytes / alone / 1e9]
    unit = "TFLOP/s" if case.flops else "GB/s"
    return Row(
        kind=case.kind,
        name=case.name,
        forward_s=alone,
        forward_predicted_s=forward_predicted_s,
        backward_s=backward,
        backward_predicted_s=backward_predicted_s,
        rate=f"{' / '.join(f'{rate:,.0f}' for rate in rates)} {unit}",
    )


def eight_bit(device: torch.device, small: bool) -> Iterator[Row]:
    """Products in 8-bit floats, scaled by tensor and by row, and what turns a tensor into them."""
    shapes = [(8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 28672, 8192), (8192, 3584, 8192)]
    for rows, columns, depth in [(64, 96, 32)] if small else shapes:
        x = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
        w = torch.randn(columns, depth, device=device, dtype=torch.bfloat16)
        eight = [t.to(torch.float8_e4m3fn) for t in (x, w)]
        one = torch.ones((), device=device)
        by_row = torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device)
        for name, (a, b) in {"tensor": (one, one), "row": by_row}.items():
            run = partial(torch._scaled_mm, eight[0], eight[1].t(), a, b, out_dtype=torch.bfloat16, use_fast_accum=True)
            seconds = timed(run, device)
            rate = f"{2.0 * rows * columns * depth / seconds / 1e12:,.0f} TFLOP/s"
            yield Row(kind="fp8", name=f"by {name} {rows} x {columns} x {depth}", forward_s=seconds, rate=rate)

    x = torch.randn((64, 32) if small else (8192, 14336), device=device, dtype=torch.bfloat16)

    def scaled(dim: int | None) -> Tensor:
        most = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
        return (x * (448.0 / most.float())).to(torch.float8_e4m3fn)

    for name, dim in {"tensor": None, "row": 1}.items():
        seconds = timed(partial(scaled, dim), device)
        rate = f"{5.0 * x.numel() / seconds / 1e9:,.0f} GB/s"
        yield Row(kind="fp8", name=f"cast by {name}, eager, {tuple(x.shape)}", forward_s=seconds, rate=rate)
    if device.type == "cuda":
        fused = torch.compile(scaled)
        for name, dim in {"tensor": None, "row": 1}.items():
            seconds = timed(partial(fused, dim), device)
            rate = f"{5.0 * x.numel() / seconds / 1e9:,.0f} GB/s"
            yield Row(kind="fp8", name=f"cast by {name}, compiled, {tuple(x.shape)}", forward_s=seconds, rate=rate)


def differentiated(run: Callable[[], Tensor], wanted: list[Tensor], ones: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward."""
    return torch.autograd.grad(run(), wanted, ones)


def expert_layers(device: torch.device, small: bool, cluster: Cluster, precision: Precision) -> Iterator[Row]:
    """Experts, experts of a token, width, width inside an expert, tokens: of Mixtral 8x7B, Qwen3 235B and DeepSeek V3,
    whole or as many as one rank of several has; each expert has as many rows as any other."""
    shapes = [
        (8, 2, 4096, 14336, 8192),
        (128, 8, 4096, 1536, 8192),
        (16, 1, 4096, 1536, 8192),
        (32, 1, 7168, 2048, 8192),
    ]
    dtype, options = DTYPES[precision], {"activation": "silu", "gated": True}
    for experts, each, width, inner, tokens in [(4, 2, 32, 64, 64)] if small else shapes:

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype).mul_(0.02).requires_grad_()

        index = (torch.arange(tokens * each, device=device) % experts).reshape(tokens, each)
        given = (floats(tokens, width), index, floats(tokens, each), floats(experts, 2 * inner, width),
                 floats(experts, width, inner))  # fmt: skip
        graph, mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
        placeholders = [graph.placeholder(f"given_{number}") for number in range(len(given))]
        for placeholder, tensor in zip(placeholders, given, strict=True):
            placeholder.meta["val"] = mode.from_tensor(
                tensor.detach().float().cpu() if tensor is not index else index.cpu()
            )
        node = graph.call_function(composite.moe, tuple(placeholders), options)
        node.meta["val"] = placeholders[0].meta["val"]
        cost = OpCost.of(node, rule_for(node), cluster.device, precision=precision)
        price = cost.time((None,), Mesh.of(dp=1))
        run = partial(composite.moe, *given, **options)
        with torch.no_grad():
            alone = timed(run, device)
        wanted, ones = [tensor for tensor in given if tensor.requires_grad], torch.ones_like(given[0])
        backward = timed(partial(differentiated, run, wanted, ones), device) - alone
        flops = 3 * 2.0 * tokens * each * width * inner
        yield Row(
            kind="experts",
            name=f"{each} of {experts} experts, {tokens} x {width} x {inner}",
            forward_s=alone,
            forward_predicted_s=price.forward_s,
            backward_s=backward,
            backward_predicted_s=price.backward_s,
            rate=f"{flops / alone / 1e12:,.0f} / {2 * flops / backward / 1e12:,.0f} TFLOP/s",
        )


def others(device: torch.device, small: bool) -> Iterator[Row]:
    """Copies on the device and from and to the host, a fused AdamW, and the host's time to issue ops."""
    count = 1 << (16 if small else 29)
    x, y = (torch.zeros(count, device=device) for _ in range(2))
    seconds = timed(lambda: x.copy_(y), device)
    yield Row(kind="other", name="copy 2 GiB", forward_s=seconds, rate=f"{8.0 * count / seconds / 1e9:,.0f} GB/s")
    parameter = nn.Parameter(y[: count // 2])
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    seconds = timed(optimizer.step, device)
    rate = f"{28.0 * parameter.numel() / seconds / 1e9:,.0f} GB/s"
    yield Row(kind="other", name=f"fused AdamW, {parameter.numel():,} of fp32", forward_s=seconds, rate=rate)
    del optimizer, parameter
    if device.type == "cuda":
        host = torch.empty(count // 4, pin_memory=True)
        for name, run in {
            "host to device": lambda: x[: count // 4].copy_(host, non_blocking=True),
            "device to host": lambda: host.copy_(x[: count // 4], non_blocking=True),
        }.items():
            seconds = timed(run, device)
            yield Row(kind="other", name=name, forward_s=seconds, rate=f"{count / seconds / 1e9:,.1f} GB/s")
    tiny = torch.zeros(8, device=device)
    trained = torch.zeros(8, device=device, requires_grad=True)

    def issue() -> None:
        for _ in range(500):
            tiny.add_(1.0)

    def issue_both() -> None:
        total = trained
        for _ in range(500):
            total = total * 1.0
        total.sum().backward()

    for name, run, ops in (("add_, no gradient", issue, 500), ("mul, forward and backward", issue_both, 1000)):
        seconds = timed(run, device) / ops
        yield Row(kind="other", name=f"one op issued: {name}", forward_s=seconds, rate=f"{seconds * 1e6:.2f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="matmul,attention,memory,compiled,experts,fp8,other")
    parser.add_argument("--gpu", default="h100-sxm", help="entry of the catalogue that cases are priced on")
    parser.add_argument("--seconds", type=float, default=200.0, help="no case is begun after them")
    parser.add_argument("--json", type=Path, help="the rows as numbers, too")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    precision, begun, kinds = "bf16" if cuda else "fp32", time.perf_counter(), options.only.split(",")
    cluster = make_cluster(options.gpu if cuda else "cpu", 1, 1)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if cuda else "one core"
    print(f"{where}, torch {torch.__version__}, priced as {options.gpu if cuda else 'cpu'}, {precision}\n")
    columns = ["kind", "case", "forward predicted ms", "measured ms", "ratio", "backward predicted ms", "measured ms",
               "ratio", "rate, forward / backward"]  # fmt: skip
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    cases = [case for make in (matmuls, attentions, streams) for case in make(not cuda) if case.kind in kinds]
    timing = partial(measured, cluster=cluster, device=device, precision=precision)
    runs: list[Callable[[], Iterator[Row]]] = [
        *(partial(map, timing, [case]) for case in cases),
        *([partial(expert_layers, device, not cuda, cluster, precision)] if "experts" in kinds else []),
        *([partial(eight_bit, device, not cuda)] if "fp8" in kinds else []),
        *([partial(others, device, not cuda)] if "other" in kinds else []),
    ]
    rows: list[Row] = []
    for number, run in enumerate(runs):
        if time.perf_counter() - begun > options.seconds:
            print(f"\n{len(runs) - number} groups were left out: {options.seconds:.0f} s are over.")
            break
        try:
            for row in run():
                rows.append(row)
                print(shown(row), flush=True)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            name = cases[number].name if number < len(cases) else "other"
            print(f"| | {name} | {str(error).splitlines()[0][:120]} |" + " |" * 6, flush=True)
        if cuda:
            torch.cuda.empty_cache()
    if options.json is not None:
        options.json.write_text(json.dumps({"device": where, "rows": [asdict(row) for row in rows]}, indent=1))
    print(f"\n{time.perf_counter() - begun:.0f} s in all.")
    return 0


def shown(row: Row) -> str:
    """A row of the table."""
    cells: list[Any] = [row.kind, row.name]
    for predicted, seconds in (
        (row.forward_predicted_s, row.forward_s),
        (row.backward_predicted_s, row.backward_s),
    ):
        cells += ["" if math.isnan(x) else f"{x * 1e3:.3f}" for x in (predicted, seconds)]
        ratio = predicted / seconds
        cells.append("" if math.isnan(ratio) else f"{ratio:.2f}")
    return "| " + " | ".join([*cells, row.rate]) + " |"


if __name__ == "__main__":
    sys.exit(main())
