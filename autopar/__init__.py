"""autopar: a compiler that parallelises PyTorch training."""
