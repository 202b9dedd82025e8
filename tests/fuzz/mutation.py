"""Inputs that are nearly right: one that is right, with a few things changed, by a seed.

``changed_value`` changes a value of JSON or YAML by its structure, ``as_yaml`` and ``as_json`` write it with what
people and machines get wrong in a text, ``changed_bytes`` changes any file. The same seed gives the same input
everywhere.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import yaml

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# What stands in place of another value.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 65536, 10**6, 10**9, 2**31, 2**63, -(2**63), 10**25, 0.0, -0.0, 0.5,
    -1.5, 1e-308, 1e308, float("inf"), float("-inf"), float("nan"), "", " ", "1", "-1", "abc", "nan", "[]", "\0",
    "\x1b[2J", "é", "\u202e", "\U0001f600", "x" * 3000, "../../etc/passwd", "[bold]", "{0}", "%s", "a\nb", [], {}, [[]],
    [None], {"": None}, [1, 2, 3], {"a": 1}, ["a"] * 50, "0x10", "1e3", "2001-99-99", "yes",
)  # fmt: skip


def changed_value(value: Any, random: random.Random) -> Any:
    """A copy with one to three changes, each of one place."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _changed_once(value, random)
    return value


def _changed_once(value: Any, random: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return odd_value(random)
    holder, key = random.choice(places)
    change = random.randrange(12)
    if change < 3:
        holder[key] = odd_value(random)
    elif change < 6:
        holder[key] = _near(holder[key], random)
    elif change == 6:
        del holder[key]
    elif change < 9:
        other, place = random.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif change == 9:
        holder[key] = _nested(holder[key], random)
    elif isinstance(holder, dict):
        name = random.choice([str(key) + "x", str(key)[:-1], str(key).upper(), "", "a.b", 3, None, 1.5, "x" * 500])
        holder[name] = holder[key] if change == 10 else holder.pop(key)
    else:
        holder.insert(key, copy.deepcopy(holder[key]))
        if change == 11:
            holder.extend(copy.deepcopy(holder[:1]) * random.choice((1, 10, 200)))
    return value


def _places(value: Any) -> Any:
    """(mapping or list, key) of every value inside of ``value``."""
    pending = [value]
    while pending:
        holder = pending.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            pending.append(holder[key])


def odd_value(random: random.Random) -> Any:
    """One of ``ODD_VALUES``, its own."""
    return copy.deepcopy(random.choice(ODD_VALUES))


def _near(value: Any, random: random.Random) -> Any:
    """Nearly the same: another number of about its size, a word with a letter changed."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return random.choice(
            (value + 1, value - 1, value * 2, -value, value * 1000, value // 2, float(value), str(value))
        )
    if isinstance(value, float):
        return random.choice((-value, value * 1e9, value * 1e-9, str(value)))
    if isinstance(value, str):
        return random.choice((value + "x", value[:-1], value.upper(), value * 2, [value], {value: value}))
    return random.choice((list(value), str(value), [value]))


def _nested(value: Any, random: random.Random) -> Any:
    for _ in range(random.choice((1, 2, 60, 90))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def as_yaml(value: Any, random: random.Random) -> bytes:
    """YAML of a value, often with something of YAML's own that is dangerous or broken."""
    text = yaml.dump(value, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    choice = random.randrange(24)
    lines = text.split("\n")
    where = random.randrange(len(lines))
    if choice == 0:
        text = _bomb(random) + text
    elif choice == 1:
        tag = random.choice(
            ("!!python/object/apply:os.system", "!!int", "!!float", "!!timestamp", "!!set", "!", "!x", "!!bool")
        )
        lines[where] = lines[where].replace(": ", f": {tag} ", 1)
        text = "\n".join(lines)
    elif choice == 2:
        number = random.choice(
            ("9" * 5000, "1:" * 3000 + "1", "0x" + "f" * 3000, "0b" + "1" * 9000, ".inf", "1" * 30 + ".5")
        )
        lines[where] = lines[where].split(":")[0] + f": {number}"
        text = "\n".join(lines)
    elif choice == 3:
        lines[where] = (
            random.choice(("\t", "- ", "? ", "<<: ", "&a ", "*a ", "--- ", "%TAG ", "| ", "{", '"', "\\ud800"))
            + lines[where]
        )
        text = "\n".join(lines)
    elif choice == 4:
        lines.insert(where, lines[random.randrange(len(lines))])
        text = "\n".join(lines)
    elif choice == 5:
        text = random.choice(("[", "{a: ", "- ", "? ", "&a [")) * random.choice((50, 500, 50_000)) + text
    return _perhaps_broken(text.encode(errors="surrogatepass"), random)


def _bomb(random: random.Random) -> str:
    """Lists of lists of lists by aliases, or one that holds itself."""
    if random.random() < 0.3:
        return "bomb: &a {x: *a}\n"
    rows = ["b0: &b0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    rows += [f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]" for n in range(1, random.choice((2, 5, 12)))]
    return "\n".join(rows) + "\n"


def as_json(value: Any, random: random.Random) -> bytes:
    """JSON of a value, often with something broken."""
    text = json.dumps(value, default=str)
    choice = random.randrange(24)
    where = random.randrange(len(text) + 1)
    if choice == 0:
        text = random.choice(("[", '{"a":')) * random.choice((50, 5000, 200_000)) + text
    elif choice == 1:
        text = (
            text[:where]
            + random.choice(("9" * 5000, "NaN", "-Infinity", '"\\ud800"', "1e999", "'", ",", "//"))
            + text[where:]
        )
    elif choice == 2:
        text = f"[{text}]"
    return _perhaps_broken(text.encode(errors="surrogatepass"), random)


def _perhaps_broken(content: bytes, random: random.Random) -> bytes:
    return changed_bytes(content, random) if random.random() < 0.15 else content


def changed_bytes(content: bytes, random: random.Random, *, first: int | None = None) -> bytes:
    """A file with bits flipped, bytes replaced, a part cut off, doubled or filled. first: bytes that may change."""
    changed = bytearray(content)
    end = min(len(changed), first or len(changed))
    change = random.randrange(8)
    at = random.randrange(end) if end else 0
    if not changed or change == 0:
        return bytes(changed[:at])
    if change <= 3:
        for _ in range(random.choice((1, 1, 2, 8))):
            changed[random.randrange(end)] ^= 1 << random.randrange(8)
    elif change == 4:
        changed[at : at + 8] = random.choice(
            (b"\xff" * 8, b"\0" * 8, b"\x7f" * 8, b"\xff\xff\xff\x7f\0\0\0\0", b"[" * 8)
        )
    elif change == 5:
        changed[at:at] = changed[max(0, at - random.randrange(64)) : at] * random.choice((1, 2, 50))
    elif change == 6:
        del changed[at : at + random.randrange(1, 64)]
    else:
        changed[at : at + random.randrange(1, 32)] = random.randbytes(random.randrange(1, 32))
    return bytes(changed)
