"""A rank's place in a job that is supervised: what its supervisor has decided."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from autopar.runtime.copies.copier import CopyPlaces
from autopar.runtime.stores import PrefixStore, Store, TCPStore


class Watched(Protocol):
    """Takes what a rank says of itself."""

    def made(self, steps: int, safe: int, own_s: float | None = None) -> None:
        """So many steps are made, and of so many all ranks have copies. own_s: seconds of the last one in which the
        rank did not wait for others."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last step."""

    def say(self, words: bytes) -> None:
        """Words in the place of those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """store: host and port of the store where ranks meet, under ``prefix``. plan: its text. source: of the state:
    "start", "copies" or "disk", the steps that were made, and the generation of the copies."""

    rank: int
    world_size: int
    store: tuple[str, int]
    prefix: str
    plan: str
    copies: CopyPlaces
    source: tuple[str, int, int]
    progress: Watched

    def meeting(self, timeout: timedelta | None) -> Store:
        """The store, in this process."""
        timeout = timedelta(seconds=300) if timeout is None else timeout
        return PrefixStore(self.prefix, TCPStore(*self.store, is_master=False, timeout=timeout))
