"""Where a rank keeps what ZeRO shards: parameters, gradients and optimiser state."""

from __future__ import annotations

from enum import IntEnum

from autopar.ir.errors import InvalidInput


class Offload(IntEnum):
    """From the fastest place to the one with most room. Truth is whether it is not the device."""

    NONE = 0
    HOST = 1
    DISK = 2

    @property
    def words(self) -> str:
        """For a list of what a configuration has."""
        return ("", ", offloaded", ", offloaded to disk")[self]


_SAID: dict[object, Offload] = {
    False: Offload.NONE,
    "off": Offload.NONE,
    True: Offload.HOST,
    "on": Offload.HOST,
    "disk": Offload.DISK,
}


def offload_of(said: bool | str) -> Offload:
    """What a person says. Raises InvalidInput."""
    if said not in _SAID:
        raise InvalidInput(f"offload {said!r}; expected on, off or disk")
    return _SAID[said]
