"""Files that commands write. They are checked before the work begins, and what was found is kept if writing fails."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from autopar.ir.errors import InvalidInput


def check_files(*paths: Path | None) -> None:
    """Raise InvalidInput unless each of the files can be written, as far as that is known beforehand."""
    for path in paths:
        if path is not None:
            _check(path, _check_file)


def check_folder(path: Path | None) -> None:
    """Make a folder, unless it is there. Raises InvalidInput if files cannot be written into it."""
    if path is not None:
        _check(path, _check_folder)


def write(path: Path, work: Callable[[Path], object]) -> None:
    """``work(path)``, which writes the file. Raises InvalidInput."""
    try:
        work(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error


def kept(text: str, what: str) -> str:
    """Where ``text`` is that could not be written where it was wanted: in a temporary file, else printed."""
    try:
        handle, name = tempfile.mkstemp(prefix="autopar-", suffix=".yaml")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        sys.stdout.write(text)
        sys.stdout.flush()
        return f"{what} is printed above"
    return f"{what} is in {name}"


class Outputs:
    """Files about one plan, written one after the other; one that cannot be written does not keep the rest back."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Path]] = []
        self._failures: list[str] = []

    def write(self, what: str, path: Path | None, work: Callable[[Path], object]) -> None:
        """Write a file, if there is a ``path``; the error is that of ``finish``."""
        if path is None:
            return
        try:
            write(path, work)
            self.written.append((what, path))
        except InvalidInput as error:
            self._failures.append(str(error))

    def finish(self, plan: str) -> None:
        """Raise InvalidInput if a file could not be written. It says where the plan is, whose text is given."""
        if self._failures:
            where = next((f"the plan is in {path}" for what, path in self.written if what == "plan"), None)
            raise InvalidInput("\n".join([*self._failures, f"  {where or kept(plan, 'the plan that was found')}"]))


def _check(path: Path, check: Callable[[Path], None]) -> None:
    try:
        check(path)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # a name that is too long, has a zero byte, or a circle of links
        said = getattr(error, "strerror", None) or error
        raise InvalidInput(f"cannot write {str(path)!r:.200}: {said!s:.300}") from error


def _check_file(path: Path) -> None:
    folder = path.resolve().parent
    if path.is_dir():
        raise InvalidInput(f"cannot write {path}: it is a folder.\n  expected: the name of a file")
    if not folder.is_dir():
        raise InvalidInput(f"cannot write {path}: there is no folder {folder}.\n  try: make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidInput(f"cannot write {path}: permission denied")


def _check_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidInput(f"cannot write into {path}: permission denied")
