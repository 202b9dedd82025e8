"""Before each call all ranks make sure that none is in trouble, and that all are about to do the same.

    rank 0   step 12 in train mode, lr 0.001           InvalidInput: on rank 1: the arguments do not fit ...
    rank 1   step 12, but its batch has 3 rows         InvalidInput: the arguments do not fit ...

One all-reduce of a few integers between processes carries it: whether a rank has an error, and of each statement that
has to be the same its digest and the negated one, whose maxima are opposite if all ranks agree. Only if something is
wrong words are exchanged, and every rank raises the same error, before anything else is sent.

A rank that dies breaks its connections. It leaves a note of why in the store of the job, which the others raise.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autopar.ir.errors import AutoparError, InvalidInput, LaunchError

_SILENT = -(1 << 62)
_NOTE = "autopar/ended/"
_LOST = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "Socket closed",
    "connection was",
)

# What a rank says of one subject; None of one that it has nothing to say of.
Statements = Mapping[str, object]


class Accord:
    """Of the ranks of a job. All of them make one together."""

    def __init__(self, subjects: tuple[str, ...]) -> None:
        """subjects: what statements are about, the same on every rank."""
        self._subjects = subjects
        self._alone = dist.get_backend() == "fake" or dist.get_world_size() == 1
        self._group: dist.ProcessGroup | None = None
        if not self._alone:
            _leave_notes()
            # Over CPUs, so that nothing waits for a device.
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def check(self, statements: Statements, failure: Exception | None = None) -> None:
        """Raise the same error on every rank if one has a ``failure``, or if they disagree in a statement.

        statements: by subject. All ranks call together. On the rank that has it the failure itself is raised.
        """
        if self._alone:
            if failure is not None:
                raise failure
            return
        digests = [_digest(statements.get(subject)) for subject in self._subjects]
        told = [int(failure is not None)]
        for digest in digests:
            told += (_SILENT, _SILENT) if digest is None else (digest, -digest)
        seen = torch.tensor(told, dtype=torch.int64)
        with self.watched():
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
        failed, *rest = seen.tolist()
        if not failed and all(a == -b or a == _SILENT for a, b in zip(rest[::2], rest[1::2], strict=True)):
            return
        self._raise(statements, failure)

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
            said = {r: str(told[subject]) for r, (_, told) in enumerate(reports) if told.get(subject) is not None}
            if len(set(said.values())) > 1:
                usual, _ = Counter(said.values()).most_common(1)[0]
                rank, odd = next((r, text) for r, text in said.items() if text != usual)
                like = next(r for r, text in said.items() if text == usual)
                raise InvalidInput(
                    f"rank {rank} does not do what the others do; {subject}:\n  on rank {rank}: {odd}\n"
                    f"  on rank {like}: {usual}\n  expected: the same on every rank"
                )
        raise InvalidInput("ranks disagree, and say the same")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, an error of communication because a rank has ended is a LaunchError that says why it has."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, AutoparError) or not any(word in text for text in _chain(error) for word in _LOST):
                raise
            raise LaunchError(_why()) from error


def _digest(statement: object) -> int | None:
    if statement is None:
        return None
    digest = hashlib.blake2b(repr(statement).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def _why() -> str:
    """What ranks that have ended left behind."""
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        for rank in range(dist.get_world_size()):
            if store.check([f"{_NOTE}{rank}"]):
                return f"rank {rank} has ended: {store.get(f'{_NOTE}{rank}').decode()}"
    return "a rank that this one communicates with has ended; its own output says why"


@cache
def _leave_notes() -> None:
    """From now on an exception that ends this process is told to the other ranks."""
    before = sys.excepthook

    def told(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        leave_note(value)
        before(kind, value, trace)

    sys.excepthook = told


def leave_note(error: BaseException) -> None:
    """Tell the ranks that wait for this one that it ends, and why."""
    if dist.is_initialized() and not isinstance(error, KeyboardInterrupt):
        with suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{_NOTE}{dist.get_rank()}", _described(error))
