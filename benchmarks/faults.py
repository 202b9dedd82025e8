"""A soak: faults at random moments, and what becomes of the runs that they are put into.

    python benchmarks/faults.py [--faults 200] [--seed 0] [--settings gpt-pp,...] [--kinds kill-one,...] [--json FILE]

Five plans of two models on 4 to 8 gloo ranks, two of them over two hosts (network namespaces, which need root). A job
is one command with ``--keep-alive --job``; where its launcher ends the same command is given again. Each run is
compared with one of the same plan that nothing happens to: every reported loss of every step, and the last one. Of each
fault: the steps that had been reported and were made again, and the seconds until the next step is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.faulty_jobs import LEARNING_RATE, ROOT, Job, Setting, name_of
from benchmarks.two_hosts import hosts, sh

GPT, EXPERTS = "examples/gpt.py", "benchmarks/fault_models.py"
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(name="gpt-dp-tp", model=GPT, ranks=4, options=("--dp", "2", "--tp", "2", "--seq", "64")),
        Setting(name="gpt-pp", model=GPT, ranks=4, options=("--pp", "2", "--dp", "2", "--zero", "2", "--seq", "64")),
        Setting(name="gpt-zero3-8", model=GPT, ranks=8, options=("--dp", "8", "--zero", "3", "--seq", "64")),
        Setting(name="experts-2-hosts", model=EXPERTS, ranks=4, options=("--dp", "2", "--ep", "2"), hosts=2),
        Setting(name="gpt-2-hosts", model=GPT, ranks=4, options=("--dp", "4", "--zero", "1", "--seq", "64"), hosts=2),
    )
}
BATCH = "8"
# Losses under another plan, and under the same one: what is printed has six digits.
OTHER_PLAN, SAME_PLAN = 1e-6, 0.0
_DISK_FULL_S, _CUT_S, _ORPHANS_S, _LAUNCHERS_S, _STEPS_BETWEEN = 4.0, 6.0, 1.0, 40.0, 4
# Of the output before a fault that is shown where a step was lost that need not be.
_SHOWN_S = 10.0
_LIMIT_S = 120.0


@dataclass(slots=True)
class Fault:
    """kind: of it. before: the last step that was reported; resumed: where the job went on; saved: by a checkpoint.
    seconds: to the next reported step, of which a plan for fewer ranks was searched for planned_s; said: the first line
    about it."""

    setting: str
    kind: str
    before: int
    resumed: int
    saved: int
    seconds: float
    planned_s: float
    said: str
    partner_left: bool

    @property
    def lost(self) -> int:
        """Steps that were reported and made again."""
        return max(0, self.before - self.resumed)

    @property
    def needless(self) -> bool:
        """Whether a step was lost of which there was a copy, or that was saved."""
        return bool(self.lost and self.partner_left) or self.resumed < self.saved


Kind = Callable[[Job, random.Random], bool]
"""Puts a fault into a job; returns whether copies in memory of every rank are left."""


def kill_one(job: Job, draw: random.Random) -> bool:
    _signal(draw.choice(job.ranks()), signal.SIGKILL)
    return True


def kill_two(job: Job, draw: random.Random) -> bool:
    for pid in draw.sample(job.ranks(), 2):
        _signal(pid, signal.SIGKILL)
    return True


def stop_one(job: Job, draw: random.Random) -> bool:
    _signal(draw.choice(job.ranks()), signal.SIGSTOP)
    return True


def terminate_one(job: Job, draw: random.Random) -> bool:
    """All ranks save and leave, and the job is started again: by torchrun where it has started them."""
    lines = len(job.lines)
    _signal(draw.choice(job.ranks()), signal.SIGTERM)
    return _again(job, lines)


def terminate_launcher(job: Job, draw: random.Random) -> bool:
    lines = len(job.lines)
    os.kill(job.launcher().pid, signal.SIGTERM)
    return _again(job, lines)


def kill_launcher(job: Job, draw: random.Random) -> bool:
    """What it has started ends with it; where there is another launcher, all are started again."""
    host = draw.randrange(job.setting.hosts)
    orphans = job.processes(host)
    job.launcher(host).kill()
    until = time.monotonic() + _ORPHANS_S
    while left := orphans.keys() & job.processes(host).keys():
        if time.monotonic() > until:
            raise SystemExit(f"{len(left)} processes run on without their launcher")
        time.sleep(0.02)
    job.kill()
    if not job.done:
        job.start()
    return True


def _steps_of_these_ranks(job: Job) -> int:
    """Steps reported since the youngest rank that runs was started: it may not have said so yet."""
    since = max(map(_started, job.ranks()), default=0.0)
    return sum(one.reported and one.at > since for one in job.seen)


def _on_fewer_ranks(job: Job) -> bool:
    """Whether the job has gone on with fewer ranks than it began with, and not yet with all of them again."""
    last = next((line for _, line in reversed(job.lines) if "going on from" in line), "")
    return "with a plan for" in last


def _started(pid: int) -> float:
    """When a process was started, by the clock of ``time.monotonic``; the start of time for one that is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def lose_host(job: Job, draw: random.Random) -> bool:
    """All of its processes and its memory end. Without the host of the store the whole job is started again."""
    host = draw.randrange(job.setting.hosts)
    # A host that has just come back has no copy yet: that of a step is complete when the next one ends. One that was
    # cut off has ranks that wait for the others for a while, which have gone on without it.
    partner_left = len(job.hosts_with_ranks()) > 1 and _steps_of_these_ranks(job) >= 2 and not _on_fewer_ranks(job)
    job.kill(host)
    job.forget(host)
    if host == 0:
        job.kill()
        job.start()
    else:
        before = job.last
        job.wait_for(before + 2, _LIMIT_S)
        job.start([host])
    return partner_left


def cut_network(job: Job, draw: random.Random) -> bool:
    """What either host sends is lost for a while."""
    for number in range(2):
        sh("ip", "netns", "exec", f"ap{number}", "tc", "qdisc", "replace", "dev", f"apv{number}", "root", "blackhole")
    time.sleep(_CUT_S)
    for number in range(2):
        sh("ip", "netns", "exec", f"ap{number}", "tc", "qdisc", "del", "dev", f"apv{number}", "root")
    return True


def fill_disk(job: Job, draw: random.Random) -> bool:
    """The file system of its checkpoints is full for a while."""
    filler = job.folder.parent / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
    time.sleep(_DISK_FULL_S)
    filler.unlink()
    if not job.launchers_left and not job.done:  # its last checkpoint had no room
        job.start()
    return True


def damage(job: Job, draw: random.Random) -> bool:
    """A bit of the newest checkpoint is flipped, and everything is lost but the disk."""
    job.kill()
    files = sorted(path for path in _newest(job).iterdir() if path.stat().st_size)
    if len(files) > 1 and len(_saved(job)) > 1:
        path = draw.choice(files)
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(content))
    job.forget()
    job.start()
    return False


KINDS: dict[str, Kind] = {
    "kill-one": kill_one,
    "kill-two": kill_two,
    "stop": stop_one,
    "term-rank": terminate_one,
    "term-launcher": terminate_launcher,
    "kill-launcher": kill_launcher,
    "lose-host": lose_host,
    "cut-network": cut_network,
    "disk-full": fill_disk,
    "damage": damage,
}
OF_TWO_HOSTS = ("lose-host", "cut-network")
# After these the ranks may run on.
WITHOUT_A_START = ("cut-network", "disk-full")


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _again(job: Job, lines: int) -> bool:
    """The same command, once the launchers have ended, unless the job goes on before that. lines: of its output before
    the fault."""
    until = time.monotonic() + _LAUNCHERS_S
    while (left := job.launchers_left) and time.monotonic() < until:
        if left == job.setting.hosts and _went_on(job, lines) is not None:
            return True
        time.sleep(0.02)
    job.kill()
    if not job.done:
        job.start()
    return True


def _saved(job: Job) -> list[int]:
    """Steps of the checkpoints on disk."""
    return sorted(
        int(path.name.split("-")[1]) for path in job.folder.glob("step-*") if (path / "manifest.json").exists()
    )


def _newest(job: Job) -> Path:
    named = job.folder / "latest"
    return job.folder / named.read_text().strip() if named.exists() else job.folder


def make_plan(setting: Setting, folder: Path) -> Path:
    plan = folder / f"{setting.name}.yaml"
    command = [
        sys.executable, "-m", "autopar", "search", str(ROOT / setting.model), "--gpus", str(setting.ranks),
        "--gpu", "cpu", "--global-batch", BATCH, *setting.options, "-o", str(plan),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    return plan


def undisturbed(setting: Setting, plan: Path, steps: int) -> list[float]:
    """Losses of the run that nothing happens to, without supervision."""
    command = [
        sys.executable,
        "-m",
        "autopar",
        "train",
        str(ROOT / setting.model),
        str(plan),
        "--steps",
        str(steps),
        "--lr",
        LEARNING_RATE,
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    losses: list[float] = json.loads(found.stdout)["losses"]
    return losses


def soak(setting: Setting, kinds: list[str], draw: random.Random, folder: Path) -> tuple[list[Fault], float]:
    """Faults of these kinds, one after another, in a run; and the largest difference of a loss."""
    plan = make_plan(setting, folder)
    steps = 12 + len(kinds) * (_STEPS_BETWEEN + 6)
    reference = undisturbed(setting, plan, steps)
    job = Job(setting, plan, folder / "disk" / setting.name, steps, save_every=4)
    if setting.hosts > 1:
        job.names = tuple(map(name_of, range(setting.hosts)))
    found = []
    try:
        job.start()
        for kind in kinds:
            if not job.wait_for(min(job.last + _STEPS_BETWEEN, steps), _LIMIT_S):
                raise SystemExit(f"{setting.name} stands still before {kind}:\n{job.tail}")
            if job.done:
                break
            time.sleep(draw.uniform(0, 1))
            start, fault = time.monotonic(), put(job, kind, draw)
            found.append(fault)
            print(f"  {setting.name:16} {kind:14} {fault.seconds:6.1f} s, {fault.lost} lost: {fault.said}")
            if fault.needless:
                print(
                    *(f"    {at - start:6.2f} s  {line}" for at, line in job.lines if at > start - _SHOWN_S), sep="\n"
                )
        if not job.wait_for(steps, _LIMIT_S * 4):
            raise SystemExit(f"{setting.name} stands still at the end:\n{job.tail}")
    finally:
        job.kill()
        job.forget()
    return found, max(difference(seen.loss, reference[seen.step - 1]) for seen in job.seen)


def difference(loss: float, reference: float) -> float:
    """Relative, of a loss that is printed with six digits after the point; 0 where they are the same."""
    return abs(loss - round(reference, 6)) / abs(reference)


def put(job: Job, kind: str, draw: random.Random) -> Fault:
    before, lines, seen = job.last, len(job.lines), len(job.seen)
    saved = ([0, *_saved(job)][-2 if kind == "damage" else -1 :])[0]  # the newest one is damaged
    start = time.monotonic()
    partner_left = KINDS[kind](job, draw)
    end, until = time.monotonic(), start + _LIMIT_S
    at = None
    while at is None and time.monotonic() < until:
        ended = job.done  # before its steps are looked at
        on = end if kind in WITHOUT_A_START else _went_on(job, lines)
        later = [one.at for one in job.seen[seen:] if one.reported and on is not None and one.at > on]
        at = later[0] if later else None
        if ended:
            break
        time.sleep(0.02)
    after = [line for _, line in job.lines[lines:]]
    resumed = [int(found[1]) for line in after if (found := re.search(r"going on from step (\d+)", line))]
    if any("going on from the start" in line for line in after):
        resumed.append(0)
    said = next((line for line in after if re.search(r"rank|answer|checkpoint|going on", line)), "")
    seconds = (time.monotonic() if at is None else at) - start
    on = _went_on(job, lines) or start
    before = max((one.step for one in job.seen if one.reported and one.at < on), default=before)
    return Fault(
        setting=job.setting.name,
        kind=kind,
        before=before,
        resumed=min(resumed, default=max(before, saved)),
        saved=saved,
        seconds=seconds,
        planned_s=sum(map(_searched_s, after)),
        said=said,
        partner_left=partner_left,
    )


def _searched_s(line: str) -> float:
    """Seconds that the line of a job that goes on says that a plan was searched for."""
    found = re.search(r"searched for in ([\d.]+) (s|ms)", line)
    return 0.0 if found is None else float(found[1]) * {"s": 1, "ms": 1e-3}[found[2]]


def _went_on(job: Job, first: int) -> float | None:
    """When the job said that it goes on, in the lines from the first on."""
    return next((at for at, line in job.lines[first:] if "going on from" in line), None)


def table(faults: list[Fault]) -> Iterator[str]:
    yield (
        "| fault | times | to the next step, median s | worst s | of it searching for a plan, worst s | "
        "steps lost, with copies left | without |"
    )
    yield "|---|---|---|---|---|---|---|"
    for kind in KINDS:
        own = [fault for fault in faults if fault.kind == kind]
        if own:
            seconds = [fault.seconds for fault in own]
            kept = [fault.lost for fault in own if fault.partner_left]
            other = [fault.lost for fault in own if not fault.partner_left]
            yield (
                f"| {kind} | {len(own)} | {median(seconds):.1f} | {max(seconds):.1f} | "
                f"{max(fault.planned_s for fault in own):.1f} | {max(kept, default='')} | {max(other, default='')} |"
            )
    seconds, planned_s = [fault.seconds for fault in faults], max(fault.planned_s for fault in faults)
    yield f"| all | {len(faults)} | {median(seconds):.1f} | {max(seconds):.1f} | {planned_s:.1f} | | |"


@contextmanager
def small_disk() -> Iterator[Path]:
    """A folder with a file system of its own in it, ``disk``, that can be filled; a part of the disk without root."""
    folder = Path(tempfile.mkdtemp(prefix="autopar-faults-"))
    (folder / "disk").mkdir()
    mounted = os.geteuid() == 0
    if mounted:
        sh("mount", "-t", "tmpfs", "-o", "size=192m", "tmpfs", str(folder / "disk"))
    try:
        yield folder
    finally:
        if mounted:
            sh("umount", "-l", str(folder / "disk"), check=False)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--a-run", type=int, default=10, help="faults in one run")
    parser.add_argument("--json", type=Path, help="add each fault to this file, a line each")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # jobs end with it
    draw, faults, worst = random.Random(options.seed), [], 0.0
    settings = [SETTINGS[name] for name in options.settings.split(",")]
    number = 0
    while len(faults) < options.faults:
        setting = settings[number % len(settings)]
        number += 1
        able = [kind for kind in options.kinds.split(",") if setting.hosts > 1 or kind not in OF_TWO_HOSTS]
        kinds = [draw.choice(able) for _ in range(min(options.a_run, options.faults - len(faults)))]
        with small_disk() as folder, hosts(None) if setting.hosts > 1 else nullcontext():
            found, difference = soak(setting, kinds, draw, folder)
        print(f"{setting.name}: {len(found)} faults, losses differ by {difference:.1e} at most", flush=True)
        faults += found
        worst = max(worst, difference)
        if options.json:
            with options.json.open("a") as file:
                file.writelines(json.dumps(asdict(fault)) + "\n" for fault in found)
    print(*table(faults), sep="\n")
    print(f"\nlargest difference of a loss: {worst:.1e}")
    bad = [fault for fault in faults if fault.needless]
    print(f"faults after which a step was lost that need not be: {len(bad)}", *bad, sep="\n  ")
    return 1 if bad or worst > OTHER_PLAN else 0


if __name__ == "__main__":
    sys.exit(main())
