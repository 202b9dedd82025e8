"""The stores of torch.distributed, which are public there though their module does not export them by name."""

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["DistError", "HashStore", "PrefixStore", "Store", "TCPStore"]
