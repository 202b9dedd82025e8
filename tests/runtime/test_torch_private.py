"""What is private in torch is still there and does what is relied on: a case for each name that the runtime uses."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autopar.ir.torch_private import FakeTensorMode, TorchDispatchMode, local_tensor
from autopar.runtime import torch_private as private
from autopar.runtime import torch_private_pipelining as pipelining
from tests.harness import run_ranks
from tests.private_names import Cases, public_names

cases = Cases()
case = cases.of


def test_every_name_has_a_case() -> None:
    assert set(cases) == public_names(private) | public_names(pipelining)


@pytest.mark.parametrize("name", sorted(public_names(private) | public_names(pipelining)))
def test_torch_has(name: str) -> None:
    cases[name]()


@contextmanager
def one_rank(backend: str = "gloo", store: Any = None, timeout: timedelta | None = None) -> Iterator[None]:
    store = dist.HashStore() if store is None else store
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Tensors.


@case("is_watched")
def _is_watched() -> None:
    class Watching(TorchDispatchMode):
        pass

    assert not private.is_watched()
    with Watching():
        assert private.is_watched()


@case("NO_VALUES")
def _no_values() -> None:
    with FakeTensorMode():
        value = torch.zeros(2)
        for needs in (value.tolist, value.nonzero):
            with pytest.raises(private.NO_VALUES):
                needs()


@case("FUSED_STEPS")
def _fused_steps() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    ran: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.optim.SGD([parameter], lr=0.1, fused=True).step()
        torch.optim.Adagrad([parameter], lr=0.1, fused=True).step()
    assert [op for op in ran if op in private.FUSED_STEPS] == list(private.FUSED_STEPS)
    assert all(hasattr(step, overload) for step in private.FUSED_STEPS for overload in step.overloads())


@torch.library.custom_op("autopar_tests::halved", mutates_args=())
def _halved(x: Tensor) -> Tensor:
    return x / 2


@case("in_dtensors")
def _in_dtensors() -> None:
    called: list[Any] = []

    def run(op: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        called.append((op, [type(arg) for arg in args], kwargs))
        return torch.zeros(1)

    op = torch.ops.autopar_tests.halved.default
    private.in_dtensors(op, run)
    with one_rank():
        whole = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert op(whole).tolist() == [0.0]
    assert called == [(op, [DTensor], {})]


@case("scale_all", "copy_all", "norms_of_all", "unscale_all")
def _lists() -> None:
    tensors = [torch.full((4,), 3.0), torch.full((4,), 4.0)]
    assert [norm.item() for norm in private.norms_of_all(tensors)] == [6.0, 8.0]
    private.scale_all(tensors, 0.5)
    private.scale_all(tensors, torch.tensor(2.0))
    assert tensors[0].tolist() == [3.0] * 4
    flag, factor = torch.zeros(()), torch.tensor(0.5)
    private.unscale_all(tensors, flag, factor)
    assert (tensors[1].tolist(), flag.item()) == ([2.0] * 4, 0.0)
    private.copy_all(tensors, [torch.full((4,), 5.0), tensors[1] + 1])
    assert [tensor[0].item() for tensor in tensors] == [5.0, 3.0]
    tensors[0][0] = math.inf
    private.unscale_all(tensors, flag, factor)
    assert flag.item() == 1.0


@case("is_view")
def _view() -> None:
    x = torch.ones(4, requires_grad=True) * 1
    assert private.is_view(x[1:])
    assert not private.is_view(x)


# Autograd and modules.


@case("at_end_of_backward")
def _end_of_backward() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    first, last = x * 2, x * 2 * 2

    def on_gradient(grad: Tensor) -> None:
        order.append("gradient")
        private.at_end_of_backward(lambda: order.append("end"))

    last.register_hook(on_gradient)
    x.register_hook(lambda grad: order.append("leaf"))
    (first + last).backward()
    assert order == ["gradient", "leaf", "end"]


@case("number_of_backward")
def _backward_number() -> None:
    numbers: list[int] = []
    x = torch.ones(1, requires_grad=True)
    results = x * 2, x * 3
    for result in results:
        result.register_hook(lambda grad: numbers.append(private.number_of_backward()))
    torch.stack(results).sum().backward(retain_graph=True)
    results[0].backward()
    together, same, apart = numbers
    assert together == same != apart and min(numbers) >= 0


@case("node_of_backward")
def _backward_node() -> None:
    nodes: list[object] = []

    def unpack(value: torch.Tensor) -> torch.Tensor:
        nodes.append(private.node_of_backward())
        return value

    x = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        first = x.sin()
        second = first.cos()
    second.backward()
    assert nodes == [second.grad_fn, first.grad_fn], "nodes are known by their identity"
    assert private.node_of_backward() is None


@case("incompatible_keys")
def _keys() -> None:
    own = private.incompatible_keys(["a"], ["b"])
    theirs = nn.Linear(1, 1).load_state_dict({"weight": torch.ones(1, 1), "b": torch.ones(1)}, strict=False)
    assert type(own) is type(theirs)
    assert (own.missing_keys, own.unexpected_keys) == (["a"], ["b"])


# Processes.


@case("default_store", "timeout_of")
def _store() -> None:
    with one_rank(timeout=timedelta(seconds=77)):
        store = private.default_store()
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert store.check(["key"])
        assert not store.check(["other"])
        world = dist.group.WORLD
        assert world is not None
        assert private.timeout_of(world, torch.device("cpu")) == timedelta(seconds=77)


_RECORDED = """
import torch
import torch.distributed as dist
from autopar.runtime.torch_private import group_of_name, recorded_collectives
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
(entry,) = recorded_collectives()
assert entry["profiling_name"] == "gloo:all_reduce" and entry["collective_seq_id"] == 1, entry
assert entry["input_sizes"] == [[4]] and entry["input_dtypes"] == ["Float"] and not entry["is_p2p"], entry
assert entry["retired"] in (True, False), entry
assert dist.get_process_group_ranks(group_of_name(entry["process_group"][0])) == [0]
assert group_of_name("none of them") is None
"""


@case("recorded_collectives", "group_of_name")
def _recorded_collectives() -> None:
    environ = os.environ | {"TORCH_FR_BUFFER_SIZE": "100"}
    done = subprocess.run([sys.executable, "-c", _RECORDED], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@case("fake_store")
def _fake_store() -> None:
    dist.init_process_group("fake", store=private.fake_store(), rank=3, world_size=8)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        dist.all_reduce(torch.ones(2))  # nobody waits
    finally:
        dist.destroy_process_group()


@case("flattened", "beside")
def _meshes() -> None:
    dist.init_process_group("fake", store=private.fake_store(), rank=5, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        flat = private.flattened(mesh["b", "c"])
        assert (flat.ndim, flat.size(), flat.mesh.tolist()) == (1, 4, [4, 5, 6, 7])
        both: DeviceMesh = private.beside([mesh["a"], flat])
        assert tuple(both.shape) == (2, 4)
        assert both.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    finally:
        dist.destroy_process_group()


@case("checkpoint_classes")
def _checkpoint_classes() -> None:
    found: set[tuple[str, str]] = set()

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    with tempfile.TemporaryDirectory() as folder, one_rank():
        mesh = init_device_mesh("cpu", (1,))
        save({"x": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}, storage_writer=FileSystemWriter(folder))
        with (Path(folder) / ".metadata").open("rb") as file:
            Names(file).load()
        assert FileSystemReader(folder).read_metadata().state_dict_metadata
    foreign = {name for name in found if name[0].startswith("torch") and name not in private.checkpoint_classes()}
    assert {name for name in foreign if name[1] != "float32"} == set()
    assert all(value is not None for value in private.checkpoint_classes().values())


@case("wait_at_most")
def _wait_at_most() -> None:
    made = dist.distributed_c10d
    before = made.default_pg_timeout, made.default_pg_nccl_timeout
    try:
        private.wait_at_most(timedelta(seconds=77))
        with one_rank():
            mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
            for group in (dist.new_group(), mesh.get_group("a")):
                assert private.timeout_of(group, torch.device("cpu")) == timedelta(seconds=77)
    finally:
        made.default_pg_timeout, made.default_pg_nccl_timeout = before


@case("chunks_of")
def _chunks_of() -> None:
    with one_rank():
        tensor = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        for given in (tensor, torch.ones(4, 2)):
            (chunk,) = private.chunks_of(given)
            assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((0, 0), (4, 2))


# FSDP.


def _sharded(mesh: DeviceMesh) -> Any:
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def _fsdp_on_a_rank() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    told: dict[str, Any] = {}
    torch.manual_seed(0)
    model = _sharded(mesh)
    private.prepare_sharding(model)
    x = torch.full((1, 4), 1.0 + dist.get_rank())
    gathered = [private.is_gathered(model[0])]
    model[0].unshard(async_op=True)
    gathered += [private.is_gathered(model[0])]
    private.finish_gathering(model[0])
    gathered += [private.is_gathered(model[0])]
    model[0].reshard()
    told["gathered"] = [*gathered, private.is_gathered(model[0])]
    told["sharded"] = isinstance(model[0].weight, DTensor)
    with torch.no_grad():
        told["before"] = model(x).sum().item()
        weight = model[0].weight
        model[0].weight = nn.Parameter(torch.zeros_like(weight))
    private.adopt_parameters(model[0])
    told["after"] = model(x).sum().item()
    model.reshard()

    # Gradients that a backward has left whole are reduced by hand.
    model, given = _sharded(mesh), [torch.full((1, 4), 1.0 + rank) for rank in range(2)]
    whole = [p.full_tensor().detach().requires_grad_() for p in model.parameters()]
    expected = torch.autograd.grad(sum((own @ whole[0].T @ whole[1].T).sum() for own in given), whole)
    model.set_requires_gradient_sync(False)
    model(given[dist.get_rank()]).sum().backward()
    told["left"] = [p.grad is not None for p in model.parameters()]
    model.set_requires_gradient_sync(True)
    for part in (*model, model):
        private.reduce_gradients(part)
    private.end_backward(model)
    # FSDP divides by the number of ranks.
    told["reduced"] = [
        torch.allclose(2 * p.grad.full_tensor(), own) for p, own in zip(model.parameters(), expected, strict=True)
    ]
    return told


@case("finish_gathering", "is_gathered", "prepare_sharding", "adopt_parameters", "reduce_gradients", "end_backward")
def _fsdp() -> None:
    for told in run_ranks(_fsdp_on_a_rank, 2):
        assert told.pop("before") != 0.0
        assert told.pop("gathered") == [False, True, True, False]
        assert told == {"sharded": True, "after": 0.0, "left": [False, False], "reduced": [True, True]}


def _kept_parts_on_a_rank() -> tuple[bool, float, float]:
    """Of a weight of five rows, whose parts have three and two: whether its part is in the tensor that was made for
    it, and the sums of the output with the weight's values and with three times them."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 5, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    x, made = torch.ones(1, 4), []

    def make(parts: Any) -> list[Tensor]:
        made.extend(part.clone() for _, part in parts)
        return made

    private.keep_parts_in(model, make)
    first = model(x).sum().item()
    model.reshard()
    for part in made:
        part.mul_(3)
    return local_tensor(model.weight).data_ptr() == made[0].data_ptr(), first, model(x).sum().item()


@case("keep_parts_in")
def _kept_parts() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(4, 5, bias=False)(torch.ones(1, 4)).sum().item()
    for there, first, tripled in run_ranks(_kept_parts_on_a_rank, 2):
        assert there
        assert (first, tripled) == pytest.approx((expected, 3 * expected))


def _extended_gather_on_a_rank() -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (2,))
    model, x = _sharded(mesh), torch.ones(1, 4)
    piece = local_tensor(model[0].weight)
    whole = [parameter.full_tensor() for parameter in model.parameters()]

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return (3 * piece.detach(),), None

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return (outputs[0], ()) if out is None else None

    private.extend_gather(piece, before, after)
    model(x)
    model.reshard()
    return model(x).sum().item(), (3 * x @ whole[0].T @ whole[1].T).sum().item()


@case("extend_gather")
def _extended_gather() -> None:
    for found, wanted in run_ranks(_extended_gather_on_a_rank, 2):
        assert found == pytest.approx(wanted)


def _two_meshes_on_a_rank() -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    wide, both = private.flattened(mesh["a", "b"]), mesh["a", "b"]
    placements = private.shard_placements([(both, 0), (mesh["b"], 1)])
    chosen = {id(model[0].weight): placements[both, 0], id(model[1].weight): placements[mesh["b"], 1]}
    fully_shard(model, mesh=wide, shard_placement_fn=lambda parameter: chosen[id(parameter)])
    assert isinstance(model, FSDPModule)
    return [tuple(part.weight.to_local().shape) for part in model]  # type: ignore[attr-defined]


@case("shard_placements")
def _two_meshes() -> None:
    if torch.__version__ < (2, 12):
        with pytest.raises(ImportError):
            private.shard_placements([])
        return
    # Both are cut in two along "b"; "a" replicates the first and has nothing to do with the second.
    assert run_ranks(_two_meshes_on_a_rank, 4) == [[(2, 4), (4, 2)]] * 4


# Pipelines.


@case("Action", "Kind", "with_communication")
def _actions() -> None:
    action = pipelining.Action.from_str("1F0")
    assert (action.stage_index, action.computation_type, action.microbatch_index) == (1, pipelining.Kind.FORWARD, 0)
    assert action == pipelining.Action(1, pipelining.Kind.FORWARD, 0)
    for text in ("0I1", "0W1", "0B1"):
        assert str(pipelining.Action.from_str(text)) == text
    passes = {rank: [pipelining.Action(rank, pipelining.Kind.FORWARD, 0)] for rank in range(2)}
    lowered = pipelining.with_communication(passes, lambda stage: stage, 2)
    kinds = {rank: [action.computation_type for action in own] for rank, own in lowered.items()}
    assert kinds == {
        0: [pipelining.Kind.FORWARD, pipelining.Kind.SEND_F],
        1: [pipelining.Kind.RECV_F, pipelining.Kind.FORWARD],
    }


@case("pair")
def _pair() -> None:
    """What both of a pair send comes after both, and what they receive before."""
    texts = {0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", ("1F1", "1B0"), "1B1"]}
    passes = {
        rank: [
            pipelining.pair(*map(pipelining.Action.from_str, own))
            if isinstance(own, tuple)
            else pipelining.Action.from_str(own)
            for own in order
        ]
        for rank, order in texts.items()
    }
    (at_once,) = [action for action in passes[1] if action.computation_type is pipelining.Kind.OVERLAP_F_B]
    assert [str(action) for action in at_once.sub_actions] == ["1F1", "1B0"]
    lowered = pipelining.with_communication(passes, lambda stage: stage, 2)[1]
    place = {str(action): number for number, action in enumerate(lowered)}
    middle = lowered.index(at_once)
    assert max(place["1RECV_F0"], place["1RECV_F1"]) < middle < place["1SEND_B0"]


class _Spared(pipelining.Stage):
    asked: int

    def for_each_microbatch(self, infos: tuple[Any, ...], count: int) -> dict[int, tuple[Any, ...]]:
        self.asked = count
        return dict.fromkeys(range(count), infos)

    def wants_gradients(self) -> list[bool]:
        return [True] if self.stage_index else []


def _pipeline_on_a_rank(vote: bool) -> tuple[int, int, int]:
    rank, count = dist.get_rank(), 4
    given = torch.empty(1, 4, device="meta", requires_grad=rank > 0)
    made = torch.empty(1, 4, device="meta", requires_grad=True)
    stage = _Spared(nn.Linear(4, 4, bias=False), rank, 2, torch.device("cpu"), input_args=(given,), output_args=(made,))
    loss: Callable[..., Tensor] = lambda output, target: (output - target).sum()  # noqa: E731
    schedule = pipelining.Schedule([stage], count, loss_fn=loss, scale_grads=False)
    orders = {own: [f"{own}F{m}" for m in range(count)] + [f"{own}B{m}" for m in range(count)] for own in range(2)}
    passes = {own: [pipelining.Action.from_str(text) for text in order] for own, order in orders.items()}
    schedule.follow(pipelining.with_communication(passes, lambda stage: stage, 2))
    sent: list[int] = []

    def send(action: Any, _: Any) -> None:
        sent.append(action.microbatch_index)
        for work in dist.batch_isend_irecv(stage.get_fwd_send_ops(action.microbatch_index)):
            work.wait()

    schedule.run_by(pipelining.Kind.SEND_F, send)
    x = torch.ones(count, 4)
    microbatches = [{"input": row} if rank == 0 else {} for row in x.split(1)]
    target = x if rank == 1 else None
    with schedule.given(microbatches), nullcontext() if vote else schedule.without_vote():
        schedule.step(target=target, losses=[])
    gradients = sum(p.grad is not None for p in stage.submod.parameters())
    return stage.asked, len(sent), gradients


@case("Stage", "Schedule")
def _pipeline() -> None:
    for vote in (True, False):
        assert run_ranks(_pipeline_on_a_rank, 2, vote) == [(4, 4, 1), (4, 0, 1)]
