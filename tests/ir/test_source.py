"""Which code is the user's, which is a library's, and which is this package's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import autopar.api
from autopar.ir.capture.python_state.state import Snapshot
from autopar.ir.source import file_of, is_library, is_users

_PACKAGE = str(Path(autopar.__file__).parent)


class Users(nn.Module):
    """A model in a file that imports autopar."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_whose_a_file_is() -> None:
    own = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("autopar.")}
    assert len(own) > 50 and all(is_library(file or "<none>") for file in own.values()), own
    for library in (torch.__file__, os.__file__, "<string>"):
        assert is_library(library) and not is_users(library)
    installed = str(Path(os.__file__).parent / "site-packages" / "package.py")
    assert not is_library(installed) and not is_users(installed)
    assert is_users(file_of(Users)) and not is_library(file_of(Users))


def test_this_package_holds_no_state_of_the_user() -> None:
    files = [
        str(held.container.get("__file__", ""))
        for held in Snapshot.take(Users()).held
        if isinstance(held.container, dict)
    ]
    assert __file__ in files and not [file for file in files if file.startswith(_PACKAGE)]
