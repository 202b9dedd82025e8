"""Copies of the training state in host memory: of every step, on this host and on another. See ``copier.Copier``."""
