"""Parameters, gradients and optimiser state that a plan keeps on a local disk.

file.py       tensors in a file that is mapped into memory, with checksums
mover.py      reads ahead and writes behind, on threads
blocks.py     the files of each block, brought and sent away around its forward, backward and step
steps.py      optimisers that step block by block
"""
