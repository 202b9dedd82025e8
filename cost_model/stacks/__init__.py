"""Software stacks: which kernels a training program runs, as data with sources."""
