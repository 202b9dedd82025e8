"""Processes that come together at a store that may have been used before.

torchrun's agent keeps its store when it starts its workers again, where the keys of the workers before still are. So
every process greets with a number drawn at random, and the first one answers with a new name and the greetings that it
has read: who finds its own among them is in that gathering, and none counts on a key of an earlier one.
"""

from __future__ import annotations

import json
import time
import uuid

from autopar.ir.errors import LaunchError
from autopar.runtime.stores import Store

_HELLO, _START, _CAME = "autopar/hello/", "autopar/start", "autopar/came/"
# All ask one store: at most some ten thousand times a second.
_POLL_S, _POLL_S_EACH = 0.02, 1e-4


def gather(store: Store, index: int, size: int, wait_s: float, who: str = "rank", *, come_back: bool = False) -> str:
    """A name that is new, and the same for all of ``size`` processes that call this together.

    index: of this one. who: what they are, for messages. Raises LaunchError if not all come.
    """
    if size == 1:
        return uuid.uuid4().hex
    own, deadline = uuid.uuid4().hex, time.monotonic() + wait_s
    hellos = [f"{_HELLO}{other}" for other in range(size)]
    store.set(hellos[index], own)
    said: list[str] = []
    name = ""
    while True:
        if index == 0:
            # Who greets anew has been started again: a new name, for all of them.
            if store.check(hellos) and (now := [value.decode() for value in store.multi_get(hellos)]) != said:
                name, said = uuid.uuid4().hex, now
                store.set(_START, json.dumps({"name": name, "hellos": said}))
        elif store.check([_START]):
            found = json.loads(store.get(_START))
            if found["name"] != name and len(found["hellos"]) == size and found["hellos"][index] == own:
                name = found["name"]
                store.add(f"{_CAME}{name}", 1)
        if name and store.add(f"{_CAME}{name}", 0) == size - 1:
            return name
        if time.monotonic() > deadline:
            raise LaunchError(_absent(store, hellos, index, wait_s, who))
        time.sleep(max(_POLL_S, _POLL_S_EACH * size))


def last_gathering(store: Store, size: int) -> str | None:
    """The name of the last one, to which all of ``size`` have come; None if there is none."""
    found = json.loads(store.get(_START)) if store.check([_START]) else {"hellos": []}
    if len(found["hellos"]) != size or store.add(f"{_CAME}{found['name']}", 0) != size - 1:
        return None
    name: str = found["name"]
    return name


def _absent(store: Store, hellos: list[str], index: int, wait_s: float, who: str) -> str:
    missing = [number for number, hello in enumerate(hellos) if not store.check([hello])]
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"not all of {len(hellos)} {who}s came in {wait_s:.0f} s: this is {who} {index}, and "
        + (f"{who} {named} did not come.\n" if missing else "one that came has ended or does not answer.\n")
        + "  try: the same command on every host; --timeout SECONDS"
    )
