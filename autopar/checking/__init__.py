"""A plan executed without devices: real programs, fake tensors, a process group that sends nothing."""
