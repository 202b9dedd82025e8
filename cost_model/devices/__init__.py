"""Entries of the catalogue, by maker."""
