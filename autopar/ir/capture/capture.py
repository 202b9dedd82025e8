"""Capture: an unmodified ``nn.Module`` as one functional graph over the global batch.

    model, inputs -> fake twins -> torch.export (training IR) -> functional graph -> simplified graph

No parameter is copied and nothing is computed: a 70B model is captured on a laptop.
"""

from __future__ import annotations

import hashlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from autopar.ir.autograd.backward import check_backward
from autopar.ir.autograd.function_op import without_log
from autopar.ir.autograd.hooks import refuse_hooks
from autopar.ir.autograd.interception import intercepted
from autopar.ir.autograd.recording import Recording
from autopar.ir.autograd.scans import refuse_open, scans_recorded
from autopar.ir.building import add_call
from autopar.ir.capture.captured_state import check_captured, refuse_aliases, refuse_shared
from autopar.ir.capture.explain_failure import explain, refuse_unknown_sizes
from autopar.ir.capture.fake_twins import LossFunction, fake_like, fake_model
from autopar.ir.capture.flat_call import Call
from autopar.ir.capture.flat_model import FlatModel
from autopar.ir.capture.functionalise import Functionaliser
from autopar.ir.capture.library_switches import Plainly, switch, traceable_libraries
from autopar.ir.capture.passing_checks import checks_pass
from autopar.ir.capture.python_state.second_call import check_second_call
from autopar.ir.capture.repeated_modules import NotAlike, RepeatedCall, Repetition
from autopar.ir.capture.rolling import roll_loops
from autopar.ir.capture.simplify import simplify
from autopar.ir.capture.symbols import SymbolicDims, fixed_dims
from autopar.ir.capture.value_checks import drop_value_checks
from autopar.ir.errors import CaptureError
from autopar.ir.graph import Buffer, CapturedModel, Parameter, StepInput, module_of
from autopar.ir.ops.ctc import ctc_loss_is_one_op
from autopar.ir.rules import repeat_warnings
from autopar.ir.source import WRAPPED, origin_of
from autopar.ir.torch_private import (
    FakeTensorMode,
    as_in_export,
    keep_lines_of,
    lazy_graph_modules,
    same_hooks_on_all_modules,
    storage_of,
)
from autopar.ir.torch_private_symbols import fixing_lines

aten = torch.ops.aten

# What torch.export says of lists of parameters.
_RELISTED = r"The tensor attributes? (self\.[\w.]+\._flat_weights\[\d+\](, )?)+ (was|were) assigned during export"

# What a forward, and torch.export on its way through it, may raise.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_target: Any = None,
    name: str | None = None,
    training: bool = True,
    symbolic: bool = False,
) -> CapturedModel:
    """Capture a model, in train or eval mode, over the batch of the example inputs.

    example_inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments, with
        the *global* batch first. Only shapes and dtypes of tensors matter, on whatever device they are; all
        else is baked in.
    loss_fn: ``loss_fn(output, target)``, with target from ``example_target`` or ``example_inputs["target"]``.
        Without one, the loss is ``output.loss`` or ``output["loss"]``, or the output itself if it is a
        scalar; a model that has none of these is captured without a loss.
    training: the mode. If the model is in it, each submodule is captured in the mode that it has, so that one that is
        frozen stays so; if not, all are, as after ``model.train(training)``.
    symbolic: with the batch and the lengths as symbols (``symbols.SymbolicDims``) where the model lets them be, so that
        ``captured_at`` gives the capture of other sizes.

    Raises CaptureError, naming the line of the model, if torch.export cannot follow it.
    """
    title = name or type(model).__name__
    repeat_warnings()
    refuse_hooks(model, title)
    _refuse_lazy(model, title)
    call = Call.of(model, example_inputs, loss_fn, example_target)
    traced, fixed = _traced_with_symbols(model, call, loss_fn, training) if symbolic else (None, {})
    if traced is None or not traced.symbols:
        try:
            traced = _trace(model, call, loss_fn, training, Repetition())
        except (*_FAILURES, NotAlike):
            traced = _traced_whole(title, model, call, loss_fn, training)
    refuse_unknown_sizes(title, traced.program.graph)
    traced.recording.refuse_reading(traced.twin.output.changed)
    if traced.twin.output.changed:
        _check_second_call(title, model, call, loss_fn, training)
    return replace(_assemble(model, title, call, traced), fixed=fixed)


def _refuse_lazy(model: nn.Module, title: str) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{title} cannot be captured: {name!r} has no shape until the first call of a lazy module.\n"
                "  try: a call of the model on one batch before this"
            )


def _traced_with_symbols(
    model: nn.Module, call: Call, loss_fn: LossFunction | None, training: bool
) -> tuple[_Trace | None, Mapping[str, str]]:
    """The trace with the batch and the lengths as symbols, None if it fails with them; and why some are numbers."""
    dims, reason = SymbolicDims.of(call.tensors), ""
    for repetition in (Repetition(), None):
        try:
            traced = _trace(model, call, loss_fn, training, repetition, dims)
        except (*_FAILURES, NotAlike) as error:
            reason = str(error).partition("\n")[0]
        else:
            return traced, traced.fixed
    return None, dict.fromkeys((name for own in dims.names for name in own.values() if name is not None), reason)


def _traced_whole(title: str, model: nn.Module, call: Call, loss_fn: LossFunction | None, training: bool) -> _Trace:
    """The trace of all modules after that of a few has failed: what the failure is comes up again, or is not there."""
    told = Plainly(denied=False)
    try:
        with told.asked():
            return _trace(model, call, loss_fn, training, None)
    except _FAILURES as error:
        if told.was_asked:
            with suppress(*_FAILURES), Plainly(denied=True).asked():
                return _trace(model, call, loss_fn, training, None)
        raise explain(title, error) from error


def _check_second_call(title: str, model: nn.Module, call: Call, loss_fn: LossFunction | None, training: bool) -> None:
    """Raise CaptureError if a second call would run another program than the one captured."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    own_model, own_loss_fn = fake_model(model, loss_fn, mode, training)
    twin = FlatModel(own_model, call, own_loss_fn)
    fakes = tuple(fake_like(leaf, mode) for leaf in call.tensors)
    switch(twin.model)
    try:
        with traceable_libraries(), checks_pass(), scans_recorded(), ctc_loss_is_one_op(), as_in_export():
            check_second_call(title, twin.model, own_loss_fn, lambda: twin.outputs(*fakes), mode)
    except _FAILURES as error:
        raise explain(title, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """What torch.export made of ``twin``.

    repeats: what stands for calls that were not followed. recording: the calls of autograd functions. symbols: of sizes
    of the step inputs, by name. fixed: see ``CapturedModel``.
    """

    twin: FlatModel
    mode: FakeTensorMode
    program: torch.export.ExportedProgram
    repeats: Mapping[int, RepeatedCall]
    recording: Recording
    symbols: Mapping[str, sympy.Symbol]
    fixed: Mapping[str, str]


def _trace(
    model: nn.Module,
    call: Call,
    loss_fn: LossFunction | None,
    training: bool,
    repetition: Repetition | None,
    dims: SymbolicDims | None = None,
) -> _Trace:
    """Modules that are alike are traced a few times if ``repetition`` is given. dims: those that are symbols."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None if dims is None else ShapeEnv())
    own_model, own_loss_fn = fake_model(model, loss_fn, mode, training)
    twin = FlatModel(own_model, call, own_loss_fn, dims)
    if own_loss_fn is not None:
        keep_lines_of(own_loss_fn)  # a trace keeps lines of functions called forward, and of those
    switch(twin.model)
    if repetition is not None:
        repetition.watch(twin.model)
    fakes = tuple(fake_like(leaf, mode) for leaf in call.tensors)
    with (
        lazy_graph_modules(),
        same_hooks_on_all_modules(),
        _quietly(),
        traceable_libraries(),
        checks_pass(),
        intercepted(twin.model) as recording,
    ):
        shapes = None if dims is None else dims.dynamic_shapes
        program = torch.export.export(twin, fakes, dynamic_shapes=shapes, strict=False)
    drop_value_checks(program.graph)
    repeats = {} if repetition is None else repetition.resolve(program, WRAPPED)
    symbols: Mapping[str, sympy.Symbol] = {}
    fixed: Mapping[str, str] = {}
    if dims is not None:
        inputs = _traced_inputs(program)
        # Symbols are those of the mode that torch.export has made for them.
        symbols, mode = dims.found(inputs), inputs[0].fake_mode  # type: ignore[attr-defined]  # fake tensors
        fixed = fixed_dims(dims, inputs, fixing_lines(mode))
    return _Trace(
        twin=twin, mode=mode, program=program, repeats=repeats, recording=recording, symbols=symbols, fixed=fixed
    )


def _traced_inputs(program: torch.export.ExportedProgram) -> list[Tensor]:
    """The step inputs as they were traced."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [nodes[spec.arg.name].meta["val"] for spec in specs if spec.kind is InputKind.USER_INPUT]


@contextmanager
def _quietly() -> Iterator[None]:
    """Where a model cannot be followed torch prints and logs its graph; our error says what matters of it."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, said = log.level, io.StringIO()
    log.setLevel(logging.ERROR)
    try:
        with redirect_stderr(said), without_log(), warnings.catch_warnings():
            # A recurrent module lists its parameters anew when torch.export puts others in their place.
            warnings.filterwarnings("ignore", message=_RELISTED)
            yield
    finally:
        log.setLevel(level)
    # What the model itself had to say.
    sys.stderr.write(said.getvalue())


def _assemble(model: nn.Module, title: str, call: Call, traced: _Trace) -> CapturedModel:
    """The captured model from what torch.export returned."""
    twin, mode, program = traced.twin, traced.mode, traced.program
    graph = fx.Graph()
    sources = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    kinds: dict[str, list[Any]] = {}
    for spec in program.graph_signature.input_specs:
        kinds.setdefault(spec.kind.name, []).append(spec)

    def place(name: str, value: Any) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    arguments: dict[fx.Node, Any] = {}
    exported = {spec.target.removeprefix(f"{WRAPPED}."): sources[spec.arg.name] for spec in kinds.get("PARAMETER", ())}
    parameters: dict[str, Parameter] = {}
    for parameter in _parameters_of(model):
        node = place(_identifier("p", parameter.name), fake_like(model.get_parameter(parameter.name), mode))
        parameters[node.name] = parameter
        arguments.update({exported[alias]: node for alias in parameter.names if alias in exported})
    exported = {spec.target.removeprefix(f"{WRAPPED}."): sources[spec.arg.name] for spec in kinds.get("BUFFER", ())}
    persistent = set(model.state_dict(keep_vars=True))
    buffers: dict[str, Buffer] = {}
    first: dict[int, fx.Node] = {}
    for alias, tensor in model.named_buffers(remove_duplicate=False):
        if id(tensor) not in first:
            node = first[id(tensor)] = place(_identifier("b", alias), fake_like(tensor, mode))
            buffers[node.name] = Buffer(name=alias, persistent=alias in persistent)
            if not tensor.is_meta:
                node.meta["value"] = tensor
        elif alias in persistent:
            known = buffers[first[id(tensor)].name]
            buffers[first[id(tensor)].name] = replace(known, aliases=(*known.aliases, alias))
        if alias in exported:
            arguments[exported[alias]] = first[id(tensor)]
    # A parameter or buffer of the stand-in that a list, a dict or an object holds is still that.
    nodes = {name: node for node in graph.nodes for name in _names_of(node.name, parameters, buffers)}
    named = (*twin.model.named_parameters(), *twin.model.named_buffers())
    own = {_memory_of(tensor): nodes[name] for name, tensor in named}
    constants: dict[str, Tensor] = {}
    for spec in kinds.get(InputKind.CONSTANT_TENSOR.name, ()):
        tensor = program.constants[spec.target]
        if (held := own.get(_memory_of(tensor))) is not None:
            arguments[sources[spec.arg.name]] = held
            continue
        node = place(_identifier("c", spec.target.removeprefix(f"{WRAPPED}.")), fake_like(tensor, mode))
        constants[node.name] = node.meta["value"] = tensor
        arguments[sources[spec.arg.name]] = node
    for spec in kinds.get(InputKind.CUSTOM_OBJ.name, ()):
        held = type(program.constants.get(spec.target)).__name__
        reader = next(iter(sources[spec.arg.name].users), None)
        raise CaptureError(
            f"{title} cannot be captured: forward uses a {held} of its own, which keeps what no plan knows.\n"
            f"  at {origin_of(reader)[1] if reader is not None else 'an unknown line'}\n"
            "  try: torch's own random numbers, without generator="
        )
    batch_size = int(call.tensors[0].shape[0]) if call.tensors[0].dim() else 1
    inputs: dict[str, StepInput] = {}
    for key, tensor, spec in zip(call.tensor_keys(), call.tensors, kinds.get("USER_INPUT", ()), strict=True):
        node = place(_identifier("", key.removeprefix("kwargs")), fake_like(tensor, mode))
        if traced.symbols:
            node.meta["symbolic"] = sources[spec.arg.name].meta["val"]
        batched = tensor.dim() > 0 and tensor.shape[0] == batch_size
        inputs[node.name] = StepInput(key=key, batch_dim=0 if batched else None)
        arguments[sources[spec.arg.name]] = node

    differentiable = {n for n in graph.nodes if n.name in parameters and parameters[n.name].requires_grad}
    writer = Functionaliser(
        graph=graph,
        mode=mode,
        module=program.graph_module,
        repeats=traced.repeats,
        recording=traced.recording,
        trained=frozenset(differentiable),
    )
    flat = list(writer.run(program.graph, arguments))
    has_loss = twin.output.has_loss
    refuse_shared(model, title, twin.output.updates)
    num_updates = len(twin.output.updates)
    replaced = dict(zip(twin.output.updates, flat[len(flat) - num_updates :], strict=True))
    supply = iter(flat[has_loss : len(flat) - num_updates])
    outputs = [
        next(supply) if tensor else constant
        for tensor, constant in zip(twin.output.is_tensor, twin.output.constants, strict=True)
    ]
    written = {arguments[n].name: writer.values[n] for n in writer.versions if n.op == "placeholder"}
    written |= {place: replaced[buffer.name] for place, buffer in buffers.items() if buffer.name in replaced}
    updates = {name: written[name] for name in buffers if name in written and written[name].name != name}
    graph.output((*flat[:has_loss], *outputs, *updates.values()))
    simplify(graph, differentiable=differentiable)
    refuse_open(graph)
    roll_loops(graph, mode, fed={n for n in graph.nodes if n.name in inputs}, trained=set(differentiable))
    _copy_given_updates(graph, len(updates), mode)
    graph_module = module_of(graph)
    if has_loss and traced.recording.differentiates:
        check_backward(title, graph_module, {node.name for node in differentiable})
    final = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(final, tuple) and twin.output.spec is not None
    for buffer, value in zip(updates, final[len(final) - len(updates) :], strict=True):
        buffers[buffer] = replace(buffers[buffer], updated_by=value.name)
    captured = CapturedModel(
        graph_module=graph_module,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        constants=constants,
        in_spec=call.in_spec,
        out_spec=twin.output.spec,
        has_loss=has_loss,
        num_outputs=len(outputs),
        batch_size=batch_size,
        name=title,
        fingerprint=_fingerprint(parameters, graph),
        symbols=traced.symbols,
    )
    lines = {arguments[n].name: origin_of(op)[1] for n, op in writer.written.items() if n.op == "placeholder"}
    lines = {name: line for name, line in lines.items() if name not in buffers}
    refuse_aliases(model, captured, lines)
    check_captured(captured, lines, training=twin.model.training)
    return captured


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return storage_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _names_of(place: str, parameters: Mapping[str, Parameter], buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
    return parameters[place].names if place in parameters else (buffers[place].name,)


def _copy_given_updates(graph: fx.Graph, num_updates: int, mode: FakeTensorMode) -> None:
    """Have an op compute the new value of each buffer, also where that is another buffer or a step input as it is."""
    output = graph.output_node()
    flat: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position in range(len(flat) - num_updates, len(flat)):
        if flat[position].op == "placeholder":
            with graph.inserting_before(output):
                flat[position] = add_call(graph, mode, aten.clone.default, (flat[position],), like=flat[position])
    output.args = (tuple(flat),)


def _parameters_of(model: nn.Module) -> list[Parameter]:
    """Parameters in state-dict order; tied ones once, with all their names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for alias, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(alias)
        tensors[id(tensor)] = tensor
    return [
        Parameter(
            names=tuple(aliases),
            shape=tuple(tensors[key].shape),
            dtype=tensors[key].dtype,
            requires_grad=tensors[key].requires_grad,
        )
        for key, aliases in names.items()
    ]


def _identifier(prefix: str, name: str) -> str:
    words = "".join(c if c.isalnum() else "_" for c in name).strip("_")
    return f"{prefix}_{words}" if prefix else words


def _fingerprint(parameters: Mapping[str, Parameter], graph: fx.Graph) -> str:
    """Identifies a model whatever the batch it is captured with.

    Ops on masks and positions, which no parameter reaches, are left out: which of them there are depends on sizes.
    """
    reached: set[fx.Node] = {node for node in graph.nodes if node.name in parameters}
    digest = hashlib.sha256()
    for parameter in parameters.values():
        digest.update(f"{parameter.names} {parameter.shape}\n".encode())
    for node in graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            digest.update(f"{node.meta.get('path')} {node.target}\n".encode())
    return digest.hexdigest()[:16]
