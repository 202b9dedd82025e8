"""Writing the files of a checkpoint: each rank its own, with checksums; rank 0 the rest, and then it counts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.futures import Future

from autopar.ir.errors import CheckpointError
from autopar.runtime.checkpoint.checksums import FileSums, RunningSums
from autopar.runtime.checkpoint.contents import STATE
from autopar.runtime.checkpoint.folder import complete, latest, point_to, remove_all_but, sync_folder, write_synced
from autopar.runtime.checkpoint.manifest import MANIFEST, Manifest, read_manifest


class AtomicWriter(FileSystemWriter):
    """Writes into the folder ``name`` of ``path``; the last thing it does is to make it the latest."""

    def __init__(self, path: Path, name: str, state: bytes, keep: int = 1, damaged: Collection[str] = ()) -> None:
        """state: what ``state.pt`` is to hold. keep: how many complete checkpoints stay, the new one included.

        damaged: names of those that have been found damaged, which do not count as complete.
        """
        super().__init__(path / name)
        self._run, self._name, self._state, self._keep, self._damaged = path, name, state, keep, damaged
        self.fs = self._files = _SummedFiles()

    def storage_meta(self) -> StorageMeta:
        """Metadata of the write: its id alone."""
        # Without the path, which is nobody's business in a file that may be moved.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """On every rank: write its file. What goes to the coordinator are torch's results, and the checksums."""
        written: Future[Any] = Future()
        written.set_result([*super().write_data(*args, **kwargs).wait(), *self._files.sums.values()])
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On the coordinator, after all ranks have written their files."""
        folder = self._run / self._name
        with self._files.create_stream(folder / STATE, "wb") as file:
            file.write(self._state)
            os.fsync(file.fileno())
        super().finish(metadata, [[one for one in own if not isinstance(one, FileSums)] for own in results])
        sums = {one.name: one for own in results for one in own if isinstance(one, FileSums)} | self._files.sums
        others = complete(self._run)
        number = 1 + max(others.values(), default=0)
        write_synced(folder / MANIFEST, Manifest(self._name, number, sums).to_bytes())
        sync_folder(folder)
        sync_folder(self._run)
        before = self._without_manifest()
        point_to(self._run, self._name)
        kept = [name for name in (*others, *before) if name not in self._damaged]
        remove_all_but(self._run, {self._name, *kept[: self._keep - 1]})

    def _without_manifest(self) -> list[str]:
        """The name of the latest checkpoint, if it is of an earlier version and so has no manifest."""
        with suppress(CheckpointError):
            folder = latest(self._run)
            return [folder.name] if read_manifest(folder) is None else []
        return []

    def discard(self) -> None:
        """Remove what a failed write has left. Once no rank writes any more."""
        shutil.rmtree(self._run / self._name, ignore_errors=True)


class _SummedFiles(FileSystem):
    """Files that this rank writes, and their checksums."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """A file to write into, of which the checksums are kept once it is closed."""
        path = Path(path)
        with open(path, mode) as file:
            stream = _SummedStream(cast(BinaryIO, file))
            yield stream
            stream.close()
        self.sums[path.name] = stream.running.of(path.name)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        super().rename(path, new_path)
        old, new = self.sums.pop(Path(path).name), Path(new_path).name
        self.sums[new] = FileSums(new, old.size, old.sums)


class _SummedStream:
    """What torch writes a tensor or pickles metadata into."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.running = file, RunningSums()
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes. A failure is kept until the file is synced or closed: torch makes it one without a reason."""
        if self._failure is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._failure = error
        self.running.add(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Bytes so far."""
        return self.running.size

    def flush(self) -> None:
        """Hand all to the operating system. Raises OSError of this or an earlier write."""
        if self._failure is not None:
            raise self._failure
        self._file.flush()

    def fileno(self) -> int:
        """The file's descriptor, for fsync: all that was written is there."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Write what is left. Raises OSError of this or an earlier write."""
        if not self._file.closed:
            self.flush()
            self._file.close()
