"""The command ``profile``: what this machine achieves, written as a cluster file."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
import yaml
from rich.console import Console

from autopar.cli.json_output import print_json
from autopar.cli.outputs import check_files, kept, write
from autopar.cli.progress import progress_on_stderr
from autopar.ir.errors import InvalidInput
from autopar.profiling.profile import Profile, profile
from autopar.report.table import plain_table
from autopar.runtime.launch import ensure_process_group

_HEAD = "# Measured by autopar profile. Every figure can be edited; autopar search takes it with --cluster.\n"


def run_profile(
    output: Path,
    *,
    like: str | None = None,
    seconds: float = 0.2,
    disk: Path | None = None,
    report: Path | None = None,
    json: bool = False,
) -> None:
    """Measure with every rank of the job; the first one writes and prints. Raises AutoparError."""
    check_files(output, report)
    joined = dist.is_initialized()
    ensure_process_group()
    first = dist.get_rank() == 0
    try:
        with progress_on_stderr(quiet=json or not first) as progress:
            found = profile(progress, like=like, seconds=seconds, disk=disk)
        if first:
            _write(_HEAD + yaml.safe_dump(found.description, sort_keys=False), output)
            if json:
                print_json(_summary(found))
            else:
                _print(found, output)
            if report is not None:
                from autopar.report.profile_page import profile_report

                write(report, lambda path: profile_report(found.series(), path))
    finally:
        if not joined:
            dist.destroy_process_group()


def _write(text: str, output: Path) -> None:
    try:
        write(output, lambda path: path.write_text(text, encoding="utf-8"))
    except InvalidInput as error:
        raise InvalidInput(f"{error}\n  {kept(text, 'what was measured')}") from error


def _summary(found: Profile) -> dict[str, Any]:
    """The object that ``--json`` prints: the cluster, and how far the fitted cost model is from what was measured."""
    fits = [
        {
            "name": series.name,
            "runs": len(series.points),
            "median_error": median(abs(point.error) for point in series.points),
            "largest_error": max((point.error for point in series.points), key=abs),
        }
        for series in found.series()
    ]
    return {"cluster": found.description, "fits": fits}


def _print(found: Profile, output: Path) -> None:
    console = Console(highlight=False)
    table = plain_table("measured against the fitted cost model", "runs", "median error", "largest error")
    for series in found.series():
        errors = sorted((point.error for point in series.points), key=abs)
        table.add_row(series.name, str(len(errors)), f"{abs(errors[len(errors) // 2]):.0%}", f"{errors[-1]:+.0%}")
    console.print(table)
    cluster = found.cluster
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    console.print(f"{cluster.num_gpus} ranks on {nodes}; wrote {output}", soft_wrap=True)
    if cluster.num_gpus == 1:
        console.print("one rank has no links to measure: start it with torchrun for those")
