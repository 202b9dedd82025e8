"""Checkpoints: saved under one plan, loaded under any other. See ``saving.save`` and ``loading.load``."""
