"""Starting ranks: on this machine, within a job of torchrun, or on a Ray cluster. See docs/launching.md."""
