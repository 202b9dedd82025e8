"""Peak memory of training steps, predicted and measured on up to four gloo ranks of this machine, for twenty-one plans.

    python benchmarks/memory.py [--plans "zero2;tp"] [--live]

Every rank takes two steps with AdamW, then a step under each of two trackers of torch: ``MemTracker``, which follows
the storages of tensors, and the profiler, which records every allocation of the CPU allocator, so also what ops and
gloo allocate inside. Measured is what all tensors hold between steps (gradients are None then) plus the most that the
tracker sees on top. Predicted is without the share that a GPU's caching allocator loses to fragmentation, which a
CPU's does not. ``--live`` lists, for rank 0, what was allocated where when most was.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.ir.lowered import loss_chunks, row_tiles
from autopar.load_model import load_model_file
from autopar.search.api import predict_plan

GPT = Path(__file__).parents[1] / "examples" / "gpt.py"
ROWS, SEQ, VOCAB, WIDTH, HEADS, DEPTH = 8, 128, 2048, 192, 6, 5
MIB = 1 << 20
CPU = torch.device("cpu")

Case = tuple[nn.Module, dict[str, Any]]


def _tokens() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, SEQ))


def gpt() -> Case:
    """RMSNorm spelt out, rotary embedding, grouped heads, gated feed-forward."""
    load_model_file(str(GPT))
    example = sys.modules["autopar_model_file_gpt"]
    config = example.Config(
        width=WIDTH, num_layers=DEPTH, num_heads=HEADS, num_kv_heads=HEADS // 2, hidden=512, vocabulary=VOCAB
    )
    return example.GPT(config), {"tokens": _tokens(), "targets": _tokens()}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": _tokens(), "labels": _tokens()}


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=384, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=SEQ,
        use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return MixtralForCausalLM(config), {"input_ids": _tokens(), "labels": _tokens()}


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=768,
        max_position_embeddings=SEQ, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config), {"input_ids": _tokens(), "labels": _tokens()}


def _llama_of_one_row(tokens: int, vocabulary: int, width: int, inner: int, num_layers: int) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=tokens, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    row = torch.randint(0, vocabulary, (1, tokens))
    return LlamaForCausalLM(config), {"input_ids": row, "labels": row}


def long_llama() -> Case:
    """Few layers, many tokens, many words: what a step needs is its logits, unless they come in chunks."""
    return _llama_of_one_row(1024, 8192, 128, 256, 2)


def wide_llama() -> Case:
    """Many tokens, few words, wide layers: what a step needs is those, unless they come in tiles."""
    return _llama_of_one_row(2048, 256, 64, 768, 3)


def resnet() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], layer_type="basic", num_labels=16
    )
    images, labels = torch.randn(16, 3, 96, 96), torch.randint(0, 16, (16,))
    return ResNetForImageClassification(config), {"pixel_values": images, "labels": labels}


@dataclass(frozen=True, slots=True)
class Trial:
    """A model under a plan. limits: constraints of the search. chunk, tile: logits, and numbers of a wide layer, that
    are there at once, if not as many as on a GPU."""

    model: Callable[[], Case]
    ranks: int
    limits: dict[str, Any]
    chunk: int | None
    tile: int | None


def _trial(
    model: Callable[[], Case],
    ranks: int,
    *,
    precision: str = "fp32",
    remat: str = "none",
    chunk: int | None = None,
    tile: int | None = None,
    **limits: Any,
) -> Trial:
    return Trial(model, ranks, {"precision": precision, "remat": remat, **limits}, chunk, tile)


TRIALS = {
    "one": _trial(gpt, 1),
    "ddp": _trial(llama, 2, dp=2, zero=0),
    "zero1, 2 microbatches": _trial(gpt, 2, dp=2, zero=1, num_microbatches=2, precision="bf16"),
    "zero2": _trial(llama, 4, dp=4, zero=2, precision="bf16"),
    "zero3, remat full": _trial(gpt, 2, dp=2, zero=3, remat="full"),
    "tp": _trial(llama, 2, tp=2, sp=False),
    "tp sp, remat selective": _trial(gpt, 2, tp=2, sp=True, remat="selective", precision="bf16"),
    "cp": _trial(llama, 2, cp=2, zero=0),
    "pp 1f1b": _trial(llama, 2, pp=2, schedule="1f1b", num_microbatches=4),
    "pp dp zero1": _trial(bert, 4, pp=2, dp=2, zero=1, schedule="1f1b", num_microbatches=2),
    "ep": _trial(mixtral, 2, ep=2, dp=1, tp=1, zero=0),
    "ep, remat selective": _trial(mixtral, 2, ep=2, dp=1, tp=1, zero=0, remat="selective"),
    "ep, remat alternate": _trial(mixtral, 2, ep=2, dp=1, tp=1, zero=0, remat="alternate"),
    "long": _trial(long_llama, 1),
    "long, loss in chunks": _trial(long_llama, 1, chunk=1 << 20),
    "long, loss in chunks, remat full": _trial(long_llama, 1, chunk=1 << 20, remat="full"),
    "long cp bf16, loss in chunks, remat selective": _trial(
        long_llama, 2, cp=2, chunk=1 << 20, remat="selective", precision="bf16"
    ),
    "long tp, loss in chunks": _trial(long_llama, 2, tp=2, chunk=1 << 20),
    "wide, remat full": _trial(wide_llama, 1, remat="full"),
    "wide, remat full, in tiles": _trial(wide_llama, 1, tile=1 << 19, remat="full"),
    "wide cp bf16, remat full, in tiles": _trial(wide_llama, 2, cp=2, tile=1 << 18, remat="full", precision="bf16"),
    "wide tp sp, remat full, in tiles": _trial(wide_llama, 2, tp=2, sp=True, tile=1 << 18, remat="full"),
    "ddp of convolutions": _trial(resnet, 2, dp=2, zero=0, num_microbatches=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bytes of one rank. predicted: by part. tracked, allocated: peaks by MemTracker, and by the CPU allocator."""

    name: str
    model: str
    rank: int
    predicted: dict[str, int]
    tracked: int
    allocated: int

    @property
    def total(self) -> int:
        return sum(self.predicted.values())

    def error(self, measured: int) -> float:
        return self.total / measured - 1


class _Tracker(MemTracker):
    """Without the figures of single modules, for which a module may run only once a step."""

    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...


def _tensors() -> list[Tensor]:
    """All that Python holds, one for each storage."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter) and value.device == CPU and value.untyped_storage().nbytes():
            found[value.untyped_storage().data_ptr()] = value
    return list(found.values())


def _held() -> int:
    return sum(value.untyped_storage().nbytes() for value in _tensors())


@dataclass(frozen=True, slots=True)
class _Allocation:
    """size: bytes, negative when freed. path: ops from the outermost."""

    time: int
    size: int
    address: int
    path: tuple[str, ...]


def _allocations(profiled: profile) -> list[_Allocation]:
    """In the order in which they happened."""
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    waiting: list[tuple[Any, tuple[str, ...]]]
    waiting = [(event, ()) for event in profiled.profiler.kineto_results.experimental_event_tree()]
    found = []
    while waiting:
        event, path = waiting.pop()
        waiting += [(child, (*path, event.name)) for child in event.children]
        kind, fields = event.typed
        if kind.name == "Allocation":
            found.append(_Allocation(event.start_time_ns, fields.alloc_size, fields.ptr, path))
    return sorted(found, key=lambda allocation: allocation.time)


def _most(allocations: Sequence[_Allocation]) -> tuple[int, int]:
    """The most bytes at once, and how many allocations lead to that."""
    now = most = number = 0
    for position, allocation in enumerate(allocations, 1):
        now += allocation.size
        if now > most:
            most, number = now, position
    return most, number


def _alive(allocations: Sequence[_Allocation]) -> Iterator[str]:
    """What is there after ``allocations``, by the innermost ops that made it."""
    alive = {}
    for allocation in allocations:
        if allocation.size > 0:
            alive[allocation.address] = allocation
        else:
            alive.pop(allocation.address, None)
    sizes: Counter[str] = Counter()
    for allocation in alive.values():
        path = [name for name in allocation.path if not name.startswith("autograd::engine")]
        sizes[f"{allocation.size / MIB:6.2f} each  {' > '.join(path[-4:])}"] += allocation.size
    for what, size in sizes.most_common(40):
        yield f"{size / MIB:8.2f} MiB {what}"


def measure(name: str, live: bool = False) -> Row:
    """On every rank of a process group."""
    trial = TRIALS[name]
    torch.manual_seed(0)
    if trial.chunk is not None:
        loss_chunks.LIMIT, loss_chunks.CHUNK = 2 * trial.chunk, trial.chunk
    if trial.tile is not None:
        row_tiles.LIMIT, row_tiles.TILE = 2 * trial.tile, trial.tile
    before = _held()
    model, batch = trial.model()
    parallel = autopar.parallelize(model, trial.ranks, example_inputs=batch, **trial.limits)
    del model
    plan = parallel.plan
    predicted = predict_plan(parallel.engine.captured, make_cluster("cpu", trial.ranks, trial.ranks), plan)
    optimizer = torch.optim.AdamW(parallel.parameters())
    mine = parallel.shard_batch(batch)
    del batch
    for _ in range(2):
        parallel.step(**mine)
        optimizer.step()
        optimizer.zero_grad()
    resting = _held() - before - sum(value.nbytes for value in mine.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        parallel.step(**mine)
        optimizer.step()
    allocations = _allocations(profiled)
    allocated, number = _most(allocations)
    if live and dist.get_rank() == 0:
        print(f"{name}: alive at the peak of rank 0, beside {resting / MIB:.1f} MiB between steps, in", flush=True)
        print(
            "  " + " > ".join(allocations[number - 1].path[-4:]), *_alive(allocations[:number]), sep="\n  ", flush=True
        )
    del profiled, allocations
    optimizer.zero_grad()
    tracker = _Tracker()
    tracker.track_external(*_tensors())
    with tracker:
        start = tracker.get_tracker_snapshot()[CPU]["Total"]
        parallel.step(**mine)
        optimizer.step()
    tracked = tracker.get_tracker_snapshot("peak")[CPU]["Total"] - start
    parts = predicted.memory[dist.get_rank() // plan.stage_mesh.size].as_bytes()
    del parts["workspace"]
    return Row(
        name=name,
        model=trial.model.__name__,
        rank=dist.get_rank(),
        predicted=parts,
        tracked=resting + tracked,
        allocated=resting + allocated,
    )


def _worker(rank: int, world: int, name: str, folder: str, live: bool) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(asdict(measure(name, live))))
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, *, live: bool = False) -> list[Row]:
    """Rows of all ranks, each measured in a process of its own."""
    world = TRIALS[name].ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, args=(world, name, folder, live), nprocs=world)
        return [Row(**json.loads(Path(f"{folder}/{rank}.json").read_text())) for rank in range(world)]


def table(rows: Sequence[Row]) -> str:
    """In Markdown, MiB; ranks of a plan that measured alike in one line."""
    parts = list(rows[0].predicted)
    head = ["plan", "model", "ranks", *parts, "predicted", "MemTracker", "error", "allocator", "error"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row.name, row.total, round(row.tracked / MIB, 1), round(row.allocated / MIB, 1))
        alike.setdefault(key, []).append(row)
    for found in alike.values():
        row = found[0]
        sizes = [*row.predicted.values(), row.total]
        cells = [row.name, row.model, ", ".join(str(one.rank) for one in found), *(f"{s / MIB:.1f}" for s in sizes)]
        for measured in (row.tracked, row.allocated):
            cells += [f"{measured / MIB:.1f}", f"{100 * row.error(measured):+.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    for name, errors in (
        ("MemTracker", [row.error(row.tracked) for row in rows]),
        ("the allocator", [row.error(row.allocated) for row in rows]),
    ):
        absolute = [abs(error) for error in errors]
        lines.append(
            f"\nAgainst {name}: median of absolute {100 * statistics.median(absolute):.1f} %, "
            f"worst {100 * max(errors, key=abs):+.1f} %, {sum(a <= 0.05 for a in absolute)} of {len(rows)} within 5 %."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", help="name;... instead of all", type=lambda text: text.split(";"))
    parser.add_argument("--live", action="store_true", help="what was alive at the peak of rank 0")
    options = parser.parse_args()
    print(table([row for name in options.plans or TRIALS for row in run(name, live=options.live)]))


if __name__ == "__main__":
    main()
