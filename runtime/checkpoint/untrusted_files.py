"""What is checked of files of a checkpoint before they are read, so that none takes more memory than its own length.

The unpickler of Python has a table with as many entries as the largest number that a pickle names (its memo), and
fills it with zeros: five bytes ask for 64 GiB. A pickle that ``pickle.dump`` writes has an op for every entry.
An archive may hold compressed files, a thousand times as long as it; ``torch.save`` stores them as they are.
"""

from __future__ import annotations

import io
import pickletools
import zipfile

# Bytes of an op with its argument, where that has a fixed length; bytes of the length of the argument, where one is
# said. The argument of the other ops is a line.
_FIXED = {
    ord(op.code): 1 + (op.arg.n if op.arg else 0) for op in pickletools.opcodes if op.arg is None or op.arg.n >= 0
}
_COUNTED = {
    ord(op.code): {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}.get(op.arg.n, 4)
    for op in pickletools.opcodes
    if op.arg is not None and op.arg.n < pickletools.UP_TO_NEWLINE
}
_STOP, _PUT, _LONG_PUT = ord("."), ord("p"), ord("r")
# Ops with two lines as their argument.
_TWO_LINES = (ord("i"), ord("c"))


def check_pickle(content: bytes) -> None:
    """Raise ValueError for a pickle that names an entry of its memo that it cannot have, or ends too early. O(ops)."""
    at, end = 0, len(content)
    while at < end:
        code = content[at]
        length = _FIXED.get(code)
        if length is not None:
            if code == _LONG_PUT:
                _check_entry(int.from_bytes(content[at + 1 : at + 5], "little"), end)
            elif code == _STOP:
                return
            at += length
        elif code in _COUNTED:
            size = _COUNTED[code]
            at += 1 + size + int.from_bytes(content[at + 1 : at + 1 + size], "little")
        else:
            begin = at
            for _ in range(2 if code in _TWO_LINES else 1):
                at = content.find(b"\n", at + 1)
                if at < 0:
                    raise ValueError("it ends within an op")
            if code == _PUT:
                _check_entry(int(content[begin + 1 : min(at, begin + 20)]), end)
            at += 1
    raise ValueError("it has no end")


def check_archive(content: bytes) -> None:
    """Raise ValueError for an archive with compressed files in it, and for what is none."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    if compressed:
        raise ValueError(f"{compressed[0]!r:.100} in it is compressed, as autopar saves nothing")


def _check_entry(number: int, most: int) -> None:
    if not 0 <= number <= most:
        raise ValueError(f"it names entry {number:,} of {most:,} at most")
