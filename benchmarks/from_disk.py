"""Training from disk: a model whose state is several times the memory that its ranks may have.

    python benchmarks/from_disk.py --disk /mnt/nvme [--layers 32] [--width 1024] [--ranks 2] [--times 4] [--steps 4]

A decoder trains under ZeRO-3 three times: with all state in memory, with parameters, gradients and optimiser state on
disk, and so again within a control group whose limit is the state of all ranks divided by ``--times``, Python and
torch included. Losses have to be equal. Printed are seconds of a step, bytes that the ranks read and write in it, what
the disk alone takes for these (measured as ``autopar profile --disk`` does), and the step by the larger of compute,
which is that of a step in memory, and disk. Making a control group needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

_CGROUP = Path("/sys/fs/cgroup")
VOCABULARY = 512


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", required=True, help="folder on a local disk")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2, help="of a rank")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=float, default=4.0, help="state by the memory of the control group")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--place", choices=("memory", "disk"), help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def model_of(given: argparse.Namespace) -> Any:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=given.width, intermediate_size=4 * given.width,
        num_hidden_layers=given.layers, num_attention_heads=given.width // 64, max_position_embeddings=given.length,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def run_rank(given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.cost_model.cluster_file import cluster_from_dict
    from autopar.profiling.disk import measure_disk

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = model_of(given)
    rows = given.rows * given.ranks
    tokens = torch.randint(0, VOCABULARY, (rows, given.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    # In GB, twice the bytes of all state: the search of a plan in memory is to find room.
    room = 32 * sum(parameter.numel() for parameter in model.parameters()) / 1e9
    cluster = cluster_from_dict({"gpu": "cpu", "num_gpus": given.ranks, "memory_gb": room})
    plan = autopar.search(
        model, cluster, example_inputs=batch, dp=given.ranks, zero=3, remat="full", num_microbatches=1
    )
    if given.place == "disk":
        (stage,) = plan.stages
        count = stage.last - stage.first + 1
        plan = plan.model_copy(update={"stages": [stage.model_copy(update={"offload": True, "on_disk": count})]})
    start = time.perf_counter()
    pm = autopar.parallelize(model, cluster, example_inputs=batch, plan=plan, disk=given.disk)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-4)
    made_s, losses, seconds, moved, waited = time.perf_counter() - start, [], [], [], []
    own = pm.shard_batch(batch)
    for _ in range(given.steps):
        disk = pm.engine.disk
        before = (0, 0, 0.0) if disk is None else (disk.traffic.read, disk.traffic.written, disk.traffic.waited_s)
        dist.barrier()
        start = time.perf_counter()
        losses.append(pm.step(**own).item())
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        after = (0, 0, 0.0) if disk is None else (disk.traffic.read, disk.traffic.written, disk.traffic.waited_s)
        moved.append((after[0] - before[0], after[1] - before[1]))
        waited.append(after[2] - before[2])
    rates = measure_disk(Path(given.disk), given.ranks, lambda _: None) if given.measure else {}
    if dist.get_rank() == 0:
        found = {
            "losses": losses, "seconds": seconds, "moved": moved, "waited": waited, "rates": rates, "made_s": made_s,
            "parameters": sum(p.numel() for p in model.parameters()),
        }  # fmt: skip
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


@contextmanager
def limited_to(num_bytes: int) -> Iterator[Path]:
    """The file that takes processes of a control group with so much memory, without swap."""
    first = (_CGROUP / "memory").is_dir()
    folder = (_CGROUP / "memory" if first else _CGROUP) / f"autopar-from-disk-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(num_bytes))
        yield folder / "cgroup.procs"
        peak = folder / ("memory.max_usage_in_bytes" if first else "memory.peak")
        print(f"control group: limit {num_bytes / 2**20:.0f} MiB, peak {int(peak.read_text()) / 2**20:.0f} MiB")
    finally:
        folder.rmdir()


def run(given: argparse.Namespace, place: str, procs: Path | None) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(given.ranks):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(given.ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(given.ranks),
            "THP_MEM_ALLOC_ENABLE": "1",  # as autopar train --disk has it
        }  # fmt: skip

        def enter() -> None:
            if procs is not None:
                procs.write_text(str(os.getpid()))

        command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--place", place]
        command += ["--measure"] if place == "disk" and procs is None else []
        ranks.append(subprocess.Popen(command, env=environment, preexec_fn=enter, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit(f"{place}: ranks ended with {[process.returncode for process in ranks]}")
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def main() -> int:
    given = arguments()
    if given.rank is not None:
        run_rank(given)
        return 0
    memory = run(given, "memory", None)
    state = 16 * memory["parameters"]
    limit = int(state / given.times)
    print(f"{memory['parameters'] / 1e6:.0f} million parameters, state {state / 2**20:.0f} MiB", flush=True)
    compute = statistics.median(memory["seconds"][1:])
    print("| where | s a step | MiB read, written a step and rank | disk alone s | by the larger | waited s | losses |")
    print("|---|---|---|---|---|---|---|")
    print(f"| memory | {compute:.2f} | | | | | |", flush=True)
    agrees, rates = True, {}
    for name, room in (("disk", None), (f"disk, 1/{given.times:g} of memory", limit)):
        with nullcontext() if room is None else limited_to(room) as procs:
            found = run(given, "disk", procs)
        took = statistics.median(found["seconds"][1:])
        read, written = found["moved"][-1]
        rates = found["rates"] or rates
        alone = read / rates["read_gb_s"] / 1e9 + written / rates["write_gb_s"] / 1e9
        differ = max(abs(a / b - 1) for a, b in zip(found["losses"], memory["losses"], strict=True))
        agrees &= differ < 1e-6
        print(
            f"| {name} | {took:.2f} | {read / 2**20:.0f}, {written / 2**20:.0f} | {alone:.2f} | "
            f"{took / max(alone, compute):.2f} | {statistics.median(found['waited'][1:]):.2f} | {differ:.1e} |",
            flush=True,
        )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
