"""``autopar train``: what is trained, the loop that every rank runs, and what it reports."""

from autopar.training.job import TrainingJob
from autopar.training.loop import train

__all__ = ["TrainingJob", "train"]
