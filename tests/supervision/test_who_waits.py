"""Who has not come to what the others wait in, from where each rank stands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from autopar.runtime.flight_recorder import Collective, Stand
from autopar.supervision.decision import Decision, Source
from autopar.supervision.local_ranks import LocalRanks
from autopar.supervision.progress import Progress
from autopar.supervision.who_waits import WhoWaits, who_waits
from tests.launching.plans import run

WORLD, PAIR = (0, 1, 2, 3), (0, 1)


def collective(number: int, ranks: tuple[int, ...] = WORLD, what: str = "all_reduce") -> Collective:
    return Collective(group=str(ranks), ranks=ranks, number=number, what=what, sizes="4 Float")


def waits(one: Collective, **came: int) -> Stand:
    return Stand(waits=one, last=one, came={one.group: one.number, **came})


def elsewhere(last: Collective, at: str = "model.py:3 in step") -> Stand:
    return Stand(last=last, came={last.group: last.number}, at=at)


def test_one_is_not_there() -> None:
    stands = {rank: waits(collective(7)) for rank in (0, 1, 3)} | {2: elsewhere(collective(6))}
    assert who_waits(stands).splitlines() == [
        "rank 2 has not come to all_reduce number 7 of ranks 0, 1, 2, 3 (4 Float), where ranks 0, 1, 3 wait",
        "  the last that it came to is all_reduce number 6 of ranks 0, 1, 2, 3 (4 Float); it is at model.py:3 in step",
    ]


def test_one_that_says_nothing_is_not_there() -> None:
    stands = {rank: waits(collective(7)) for rank in (0, 1, 3)}
    (line,) = who_waits(stands).splitlines()
    assert line.startswith("rank 2 has not come to all_reduce number 7")


def test_the_first_that_keeps_others_waiting_is_named() -> None:
    """Rank 3 waits for rank 1, which waits for rank 0, which is stuck."""
    stands = {0: elsewhere(collective(4, PAIR)), 1: waits(collective(5, PAIR)), 2: waits(collective(9)),
              3: waits(collective(9))}  # fmt: skip
    first, _ = who_waits(stands).splitlines()
    assert first.startswith("rank 0 has not come to all_reduce number 5 of ranks 0, 1 ")
    assert first.endswith("where rank 1 waits")


def test_ranks_that_wait_for_each_other() -> None:
    one, other = collective(5, PAIR), collective(9, PAIR, "all_gather")
    other = Collective(group="other", ranks=PAIR, number=9, what="all_gather", sizes="8 Float")
    stands = {0: waits(one, other=8), 1: waits(other, **{one.group: 4})}
    said = who_waits(stands)
    assert "rank 1 has not come to all_reduce number 5" in said and "rank 0 has not come to all_gather number 9" in said


def test_all_are_there_and_it_does_not_end() -> None:
    said = who_waits({rank: waits(collective(7)) for rank in WORLD})
    assert said.startswith("all of its ranks have come to all_reduce number 7") and "does not end" in said


def test_nobody_waits() -> None:
    assert who_waits({}) == "" == who_waits({0: elsewhere(collective(6))})


class Ranks:
    def __init__(self, *ranks: int) -> None:
        self.progress = {rank: Progress() for rank in ranks}

    def stands(self) -> dict[int, Progress]:
        return dict(self.progress)


def test_supervisors_tell_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.supervision.who_waits._EVERY_S", 0.0)
    store = dist.HashStore()
    decision = Decision(
        generation=1, plan="", same_plan=True, ranks={0: (0, 1), 4: (2, 3)}, hosts={0: "a", 4: "b"},
        source=Source(kind="start"),
    )  # fmt: skip
    hosts = {index: Ranks(*own) for index, own in decision.ranks.items()}
    both = {index: WhoWaits(store, 1, index, decision, cast(LocalRanks, own)) for index, own in hosts.items()}

    def say(rank: int, stand: Stand | None) -> None:
        words = b"" if stand is None else json.dumps(stand.to_plain()).encode()
        hosts[0 if rank < 2 else 4].progress[rank].say(words)

    def told() -> list[str]:
        for one in both.values():
            one.look()
        return [one.told() for one in both.values()]

    assert told() == ["", ""]
    for rank in (0, 1, 3):
        say(rank, waits(collective(7)))
    say(2, elsewhere(collective(6)))
    first, second = told()
    assert first == second and first.startswith("rank 2 has not come to all_reduce number 7")
    del hosts[0].progress[0]  # it has ended, since it waited in vain
    assert told() == [first, first]
    for rank in (1, 2, 3):
        say(rank, None)
    assert "where rank 0 waits" in told()[0]


def test_words_that_a_rank_says_fit_or_are_left_out() -> None:
    progress = Progress()
    progress.made(3, 3, 0.5)
    assert progress.said == b""
    progress.say(b"words")
    assert progress.said == b"words"
    progress.say(bytes(1 << 20))
    assert progress.said == b""
    assert progress.own_s(3, 1) == [0.5]


SCRIPT = """
import json
import os
import threading
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from autopar.runtime.flight_recorder import record, stand

record()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, x = dist.get_rank(), torch.ones(4)
pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")).get_group("b")
dist.all_reduce(x)
dist.all_reduce(x, group=pair)
work = None if rank == 3 else dist.all_reduce(x, group=pair, async_op=True)
if rank < 2:
    work.wait()
    work = dist.all_gather([torch.ones(4) for _ in range(4)], x, async_op=True)


def say():
    with open(f"{__file__}.rank{rank}", "w") as said:
        json.dump(stand().to_plain(), said)


threading.Timer(1, say).start()
time.sleep(2)
os._exit(0)
"""


def test_the_flight_recorder_says_where_ranks_stand(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script))
    assert done.returncode == 0, done.stderr
    plain: list[Any] = [json.loads((tmp_path / f"script.py.rank{rank}").read_text()) for rank in range(4)]
    stands = {rank: Stand.of_plain(one) for rank, one in enumerate(plain)}
    assert [stands[rank].waits and stands[rank].waits.what for rank in range(4)] == [
        "all_gather", "all_gather", "all_reduce", None,
    ]  # fmt: skip
    first, second = who_waits(stands).splitlines()
    assert first == "rank 3 has not come to all_reduce number 2 of ranks 2, 3 (4 Float), where rank 2 waits"
    assert "all_reduce number 1 of ranks 2, 3" in second and "script.py" in second
