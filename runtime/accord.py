"""Before each call all ranks make sure that none is in trouble, and that all are about to do the same.

    rank 0   step 12 in train mode, lr 0.001           InvalidInput: on rank 1: the arguments do not fit ...
    rank 1   step 12, but its batch has 3 rows         InvalidInput: the arguments do not fit ...

One all-reduce of a few integers between processes carries it: whether a rank has an error, and of each statement that
has to be the same its digest (of a number itself) and the negated one, whose maxima are opposite if all ranks agree.
Only if something is wrong words are exchanged, and every rank raises the same error, before anything else is sent.

A rank that ends breaks its connections. It leaves a note of why in the store of the job, which the others raise. One
that does not come, because it runs something else, is waited for; after a while those that wait say which it is.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autopar.ir.errors import AutoparError, InvalidInput, LaunchError
from autopar.runtime.torch_private import default_store, timeout_of

_SILENT = -(1 << 62)
_NOTICE = "a notice"
_NOTE, _WAITS = "autopar/ended/", "autopar/waits/"
_SETTING = re.compile(r"\w+=(?:\([^)]*\)|[^,;()\s]+)")  # lr=0.1, betas=(0.9, 0.99)
_PATIENCE = timedelta(seconds=60)
_LOST = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "Socket closed",
    "connection was",
)
# What gloo says where the time is over that the process group allows.
_LATE = "Timed out waiting"

# The group of all ranks -> that over which they agree.
_MADE: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

# What a rank says of one subject; None of one that it has nothing to say of.
Statements = Mapping[str, object]


class WaitingWarning(UserWarning):
    """Some ranks have come to a call that all make together, and others have not."""


class Accord:
    """Agreement of the ranks of a job. All ranks make one together."""

    def __init__(
        self,
        subjects: tuple[str, ...],
        patience: timedelta = _PATIENCE,
        free: Collection[str] = frozenset(),
    ) -> None:
        """subjects: what statements are about, the same on every rank. patience: until a rank says that it waits. free:
        subjects in which ranks may differ.
        """
        self._subjects, self._patience, self._free = (*subjects, _NOTICE), patience, free
        self._alone = dist.get_backend() == "fake" or dist.get_world_size() == 1
        self._group: dist.ProcessGroup | None = None
        self._number = 0
        self.numbers: dict[str, int] = {}
        """Subject -> what was said of it in the last check, where it is a number, by any rank."""
        self.notice = 0
        """What this rank tells all others with the next call: a number, 0 for nothing."""
        if not self._alone:
            _leave_notes()
            self._group = _between_cpus()

    @property
    def group_name(self) -> str | None:
        """Name of the process group that ranks agree over; None before the first call."""
        return None if self._group is None else self._group.group_name

    @property
    def noticed(self) -> int:
        """The largest of the notices that ranks gave with the last call, the same on all of them."""
        return self.numbers.get(_NOTICE, 0)

    def check(self, statements: Statements, failure: Exception | None = None) -> bool:
        """Raise the same error on every rank if one has a ``failure``, or if they disagree in a statement.

        statements: by subject. All ranks call together. On the rank that has it the failure itself is raised. Returns
        whether they agree where they need not.
        """
        statements = {**statements, _NOTICE: self.notice}
        if self._alone:
            if failure is not None:
                raise failure
            self.numbers = {subject: said for subject, said in statements.items() if isinstance(said, int)}
            return True
        digests = [_digest(statements.get(subject)) for subject in self._subjects]
        told = [int(failure is not None)]
        for digest in digests:
            told += (_SILENT, _SILENT) if digest is None else (digest, -digest)
        seen = torch.tensor(told, dtype=torch.int64)
        self._number += 1
        with self.watched():
            self._wait(dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group, async_op=True), statements)
        failed, *rest = seen.tolist()
        pairs = list(zip(self._subjects, rest[::2], rest[1::2], strict=True))
        differing = {subject for subject, a, b in pairs if a not in (-b, _SILENT)} - {_NOTICE}
        self.numbers = {subject: a for subject, a, _ in pairs if a != _SILENT}
        if failed or differing.difference(self._free):
            self._raise(statements, failure)
        return not differing

    def _wait(self, work: dist.Work, statements: Statements) -> None:
        """Wait for all ranks; of those that do not come in a while, say which they are, or raise why they have ended.

        Raises LaunchError where the time is over that the process group allows.
        """
        try:
            work.wait(self._patience)
            return
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
        said = next((text for subject, text in statements.items() if subject != _NOTICE), None)
        what = f"{said or 'a call that all make together'}"
        store, own = default_store(), dist.get_rank()
        store.set(f"{_WAITS}{own}", str(self._number))
        time.sleep(min(1.0, self._patience.total_seconds()))  # for those that have waited as long
        if _ended() is None:
            absent = f"{_named(self._absent(store))} has not come to {what}"
            warnings.warn(
                f"rank {own} has waited {self._patience.total_seconds():.0f} s: {absent}.\n  expected: the same calls "
                "on every rank; one that does something else for a while is waited for",
                WaitingWarning,
                stacklevel=4,
            )
            try:
                work.wait()
                return
            except RuntimeError as error:
                if _LATE not in str(error):
                    raise
                raise LaunchError(
                    f"{absent}, for as long as the process group waits.\n  expected: the same calls on every rank"
                ) from error
        raise LaunchError(_why())

    def _absent(self, store: Any) -> list[int]:
        """The ranks that do not wait where this one does."""
        here = str(self._number).encode()
        keys = {rank: f"{_WAITS}{rank}" for rank in range(dist.get_world_size())}
        return [rank for rank, key in keys.items() if not (store.check([key]) and store.get(key) == here)]

    def fail(self, error: Exception) -> NoReturn:
        """Raise ``error``, and on every other rank, where it makes its next check, the same with the rank's number."""
        with suppress(LaunchError):
            self.check({}, error)
        raise error

    def _raise(self, statements: Statements, failure: Exception | None) -> NoReturn:
        reports: list[Any] = [None] * dist.get_world_size()
        own = failure if isinstance(failure, AutoparError) or failure is None else _described(failure)
        with self.watched():
            dist.all_gather_object(reports, (own, dict(statements)), group=self._group)
        if failure is not None:
            raise failure
        for rank, (other, _) in enumerate(reports):
            if isinstance(other, AutoparError):
                raise type(other)(f"on rank {rank}: {other}")
            if other is not None:
                raise LaunchError(f"on rank {rank}: {other}")
        for subject in self._subjects:
            if subject in self._free or subject == _NOTICE:
                continue
            said = {r: str(told[subject]) for r, (_, told) in enumerate(reports) if told.get(subject) is not None}
            if len(set(said.values())) > 1:
                usual, _ = Counter(said.values()).most_common(1)[0]
                rank, odd = next((r, text) for r, text in said.items() if text != usual)
                like = next(r for r, text in said.items() if text == usual)
                raise InvalidInput(
                    f"rank {rank} does not do what the others do; {subject}{_difference(odd, usual)}:\n"
                    f"  on rank {rank}: {odd}\n  on rank {like}: {usual}\n  expected: the same on every rank"
                )
        raise InvalidInput("ranks disagree, and say the same")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, an error of communication because a rank has ended is a LaunchError that says why it has."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, AutoparError) or not is_lost(error):
                raise
            raise LaunchError(_why()) from error


def is_lost(error: BaseException, *, late: bool = False) -> bool:
    """Whether an error says that a rank could not be reached. late: or was waited for in vain."""
    words = (*_LOST, _LATE) if late else _LOST
    return any(word in text for text in _chain(error) for word in words)


def _digest(statement: object) -> int | None:
    if statement is None or isinstance(statement, int):
        return statement
    digest = hashlib.blake2b(repr(statement).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def _difference(odd: str, usual: str) -> str:
    """The settings in which two lists of them differ."""
    one, other = (_SETTING.findall(text) for text in (odd, usual))
    first, second = (", ".join(dict.fromkeys(own)) for own in (_without(one, other), _without(other, one)))
    return f" has {first} in place of {second}" if first and second else ""


def _without(settings: list[str], others: list[str]) -> list[str]:
    return [setting for setting in settings if setting not in others]


def _why() -> str:
    return _ended() or "a rank that this one communicates with has ended; its own output says why"


def _ended() -> str | None:
    """What a rank that has ended left behind, if one has."""
    with suppress(Exception):
        store = default_store()
        for rank in range(dist.get_world_size()):
            if store.check([f"{_NOTE}{rank}"]):
                return f"rank {rank} has ended: {store.get(f'{_NOTE}{rank}').decode()}"
    return None


def _named(ranks: list[int]) -> str:
    first = ", ".join(map(str, ranks[:4]))
    return f"rank {first}" if len(ranks) == 1 else f"each of ranks {first}" + (", ..." if len(ranks) > 4 else "")


def _between_cpus() -> dist.ProcessGroup:
    """All ranks over gloo, so that nothing waits for a device, and apart from what else they send each other."""
    world = dist.group.WORLD
    assert world is not None, "the default group is there"
    for gone in _MADE.keys() - {world}:
        del _MADE[gone]
    if world not in _MADE:
        device = torch.device("cpu" if dist.get_backend() == "gloo" else "cuda")
        _MADE[world] = dist.new_group(backend="gloo", timeout=timeout_of(world, device))
    return _MADE[world]


@cache
def _leave_notes() -> None:
    """From now on it is told to the other ranks if this process ends, and by which exception."""
    before = sys.excepthook

    def told(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        leave_note(value)
        before(kind, value, trace)

    sys.excepthook = told
    atexit.register(_note, "its program came to an end")


def leave_note(error: BaseException) -> None:
    """Tell the ranks that wait for this one that it ends, and why."""
    if not isinstance(error, KeyboardInterrupt):
        _note(_described(error))


def _note(text: str) -> None:
    """The first note that this rank leaves."""
    if dist.is_initialized():
        with suppress(Exception):
            store, key = default_store(), f"{_NOTE}{dist.get_rank()}"
            if not store.check([key]):
                store.set(key, text)
