"""YAML and JSON of users, read within limits, so that no file takes more than seconds and some hundred megabytes.

    bytes      MAX_BYTES a file, unless the reader says otherwise
    values     one for every 32 bytes that a file may have, counted as if every alias of YAML were written out
    depth      MAX_DEPTH mappings and lists inside one another
    integers   64 bits
    strings    MAX_STRING characters, none of them half of a surrogate pair, which cannot be written again

Values are those that JSON has, and dates; tags of YAML are refused. Whoever reads a file says which error it raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import yaml

from autopar.ir.errors import AutoparError

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_STRING = 1 << 16
_BYTES_A_VALUE = 32
_INTEGER_BITS = 64
# Of a number in YAML, which may count in sixties: reading it takes the square of its length.
_MAX_NUMBER = 1000
# Bad fields that a message lists, and characters of each.
_LISTED, _SHOWN = 10, 600

# libyaml where PyYAML was built with it: ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _BeyondLimit(ValueError):
    """What a text has that none may have."""


def read_text(path: str | Path, what: str, error: type[AutoparError], *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file in UTF-8. what: the file is, for the message. Raises ``error``."""
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise error(f"{what} {path} is too long: expected {max_bytes:,} bytes at most")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise error(
            f"{what} {path} is not text in UTF-8: byte {wrong.start:,} is {content[wrong.start]:#04x}"
        ) from wrong
    except OSError as wrong:
        raise error(f"cannot read {what} {path}: {wrong.strerror}") from wrong
    except ValueError as wrong:
        raise error(f"cannot read {what} {str(path)!r}: {wrong}") from wrong


def parse_yaml(text: str, source: str, error: type[AutoparError], *, max_bytes: int = MAX_BYTES) -> Any:
    """The value of a YAML text. Raises ``error``, which names the ``source``."""
    try:
        _check_length(text, max_bytes)
        _check_events(text, max_bytes // _BYTES_A_VALUE)
        # The loader is PyYAML's safe one.
        value = yaml.load(text, Loader=_Loader)
        _check_values(value, max_bytes // _BYTES_A_VALUE)
    except _BeyondLimit as wrong:
        raise error(f"{source} is not read: {wrong}") from wrong
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as wrong:
        raise error(f"{source} is not YAML: {_short(str(wrong))}") from wrong
    return value


def parse_json(text: str, source: str, error: type[AutoparError], *, max_bytes: int = MAX_BYTES) -> Any:
    """The value of a JSON text, NaN and Infinity included. Raises ``error``, which names the ``source``."""
    try:
        _check_length(text, max_bytes)
        value = json.loads(text)
        _check_values(value, max_bytes // _BYTES_A_VALUE)
    except _BeyondLimit as wrong:
        raise error(f"{source} is not read: {wrong}") from wrong
    except (ValueError, RecursionError) as wrong:
        raise error(f"{source} is not JSON: {_short(str(wrong))}") from wrong
    return value


def bad_fields(found: pydantic.ValidationError, root: str) -> str:
    """A line for each bad field: its path and what is wrong. root: what stands for the path of the whole."""
    wrong = found.errors(include_url=False, include_input=False)
    lines = [_short(f"  {'.'.join(map(str, one['loc'])) or root}: {one['msg']}") for one in wrong[:_LISTED]]
    more = [f"  and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
    return "\n".join([*lines, *more])


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _check_length(text: str, max_bytes: int) -> None:
    if len(text) > max_bytes:
        raise _BeyondLimit(f"it has {len(text):,} characters; expected {max_bytes:,} at most")


def _check_events(text: str, max_values: int) -> None:
    """Limits of YAML that have to hold before values are made: of depth, and of values that aliases multiply."""
    sizes: dict[str, int] = {}  # of what has an anchor, with all inside it
    begun: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            if event.tag is not None:
                raise _BeyondLimit(f"line {mark.line + 1} has the tag {_short(event.tag)}; expected none")
            if isinstance(event, yaml.ScalarEvent):
                _check_number(event)
            if event.anchor is not None:
                # An alias inside of what it stands for has no end.
                sizes[event.anchor] = 1 if isinstance(event, yaml.ScalarEvent) else max_values
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, count))
                _check_depth(len(begun))
            count += 1
        _check_count(count, max_values)


def _check_number(event: yaml.ScalarEvent) -> None:
    text = event.value
    if event.implicit[0] and len(text) > _MAX_NUMBER and text.lstrip("+-.")[:1].isdigit():
        raise _BeyondLimit(f"it has a number of {len(text):,} characters; expected {_MAX_NUMBER:,} at most")


def _check_values(value: Any, max_values: int) -> None:
    pending, count = [(value, 1)], 0
    while pending:
        one, depth = pending.pop()
        count += 1
        _check_count(count, max_values)
        if isinstance(one, str):
            _check_string(one)
        elif isinstance(one, int) and one.bit_length() > _INTEGER_BITS:
            raise _BeyondLimit(f"it has an integer of {one.bit_length():,} bits; expected {_INTEGER_BITS} at most")
        elif isinstance(one, (dict, list, tuple)):
            _check_depth(depth)
            pending += ((inner, depth + 1) for inner in one)
            if isinstance(one, dict):
                pending += ((inner, depth + 1) for inner in one.values())


def _check_count(count: int, max_values: int) -> None:
    if count > max_values:
        raise _BeyondLimit(f"it has more than {max_values:,} values, aliases written out")


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _BeyondLimit(f"mappings and lists are nested more than {MAX_DEPTH} deep")


def _check_string(text: str) -> None:
    if len(text) > MAX_STRING:
        raise _BeyondLimit(f"it has a string of {len(text):,} characters; expected {MAX_STRING:,} at most")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise _BeyondLimit("it has half of a surrogate pair in a string, which is no character")
