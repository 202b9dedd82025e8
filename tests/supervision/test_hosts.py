"""What is left of jobs in memory, and when it is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autopar.supervision.hosts import claim


def test_what_has_an_owner_left_stays(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {"lost": [ended.pid], "shared": [ended.pid, os.getpid()], "lasting": []}
    folders = {name: tmp_path / f"autopar-{os.getuid()}-{name}" for name in names}
    for name, pids in names.items():
        folders[name].mkdir()
        for pid in pids:
            (folders[name] / f"owner-{pid}").touch()
    claim(tmp_path / f"autopar-{os.getuid()}-own", lasting=False)
    assert [name for name, folder in folders.items() if folder.exists()] == ["shared", "lasting"]
