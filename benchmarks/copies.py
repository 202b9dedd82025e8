"""What copies of every step cost: steps with them and without, in turns, in one run.

    python benchmarks/copies.py [--turns 40] [--steps 4] [--hosts 2] [--zero 3] [--widths 128,256]

Four gloo ranks train ``examples/gpt.py`` in several sizes, with AdamW. A turn is a few steps without copies and as many
with them; printed are the medians over turns, the median of their ratios with its interval of 95 %, and whether a
step's copy was safe before the next step ended. hosts: how many the ranks pretend to be on, so that they send their
copies to each other. zero: the level of the plan; at 3 partners have no state in common, and all of it is sent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import autopar
from autopar.load_model import load_model_file
from autopar.runtime.copies.copier import Copier, CopyPlaces
from autopar.runtime.copies.places import memory_folder
from autopar.runtime.copies.snapshot import Snapshots
from tests.harness import run_ranks

ROOT = Path(__file__).parent.parent
RANKS = 4
# Width, layers, rows and tokens a row of a global batch.
SIZES = ((128, 4, 16, 128), (256, 4, 16, 128), (512, 4, 32, 128), (512, 4, 64, 256))


def measure(
    folder: str, size: tuple[int, int, int, int], turns: int, steps: int, hosts: int, zero: int | None
) -> dict[str, Any]:
    width, layers, rows, seq = size
    source = load_model_file(str(ROOT / "examples" / "gpt.py"))
    module = sys.modules[source.build().__class__.__module__]
    config = module.Config(width=width, num_layers=layers, hidden=int(2.75 * width))
    torch.manual_seed(0)
    model = module.GPT(config)
    pm = autopar.parallelize(model, RANKS, example_inputs=module.example_inputs(rows, seq), dp=2, tp=2, pp=1, zero=zero)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    host = str(dist.get_rank() * hosts // RANKS)
    copier = Copier(Snapshots(pm, optimizer), CopyPlaces(Path(folder) / host, host, 1))
    batches = module.batches(rows, seq)
    number, safe, found = 0, True, []
    for turn in range(turns + 1):
        seconds = []
        for copies in (turn % 2 == 0, turn % 2 == 1):
            dist.barrier()
            start = time.perf_counter()
            for again in range(steps):
                pm.step(*pm.shard_batch(next(batches)))
                if copies:
                    safe &= not again or copier.safe == number
                    copier.wait_copied()
                optimizer.step()
                optimizer.zero_grad()
                number += 1
                if copies:
                    copier.begin(number)
            if copies:
                safe &= copier.finish() == number
            dist.barrier()
            seconds.append(((time.perf_counter() - start) / steps, copies))
        if turn:  # the first allocates
            found.append({copies: value for value, copies in seconds})
    ratios = sorted(turn[True] / turn[False] for turn in found)
    # The ranks of the values between which the median lies with 95 %: binomial, by its normal approximation.
    margin = 0.98 * len(ratios) ** 0.5
    first, last = (round(len(ratios) / 2 + sign * margin) for sign in (-1, 1))
    return {
        "without": median(turn[False] for turn in found),
        "with": median(turn[True] for turn in found),
        "ratio": median(ratios),
        "interval": (ratios[max(first - 1, 0)], ratios[min(last, len(ratios) - 1)]),
        "safe": safe,
        "bytes": sum(slot.data.numel() for slot in copier._slots.values()) / len(copier._slots),
        "sent": sum(slot.beginning.numel() for slot in copier._slots.values()) / len(copier._slots) * (hosts > 1),
        "zero": pm.plan.zero,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--zero", type=int, help="the level of the plan; searched where it is not given")
    parser.add_argument("--widths", default="128,256,512", help="sizes of these widths alone")
    options = parser.parse_args()
    widths = {int(width) for width in options.widths.split(",")}
    print(f"{RANKS} ranks on {options.hosts} hosts, medians of {options.turns} turns of {options.steps} steps each")
    print("| width, layers, rows, tokens | ZeRO | MiB of a copy | sent | ms a step without | with | ratio | 95 % |")
    print("|---|---|---|---|---|---|---|---|")
    for size in (size for size in SIZES if size[0] in widths):
        with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
            arguments = folder, size, options.turns, options.steps, options.hosts, options.zero
            found = run_ranks(measure, RANKS, *arguments, idle_s=600.0, limit_s=6000.0)[0]
        print(
            f"| {', '.join(map(str, size))} | {found['zero']} | {found['bytes'] / 2**20:.1f} | "
            f"{found['sent'] / 2**20:.1f} | {1e3 * found['without']:.0f} | "
            f"{1e3 * found['with']:.0f} | {found['ratio']:.3f} | "
            f"{found['interval'][0]:.3f} to {found['interval'][1]:.3f} |{'' if found['safe'] else ' a copy came late'}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
