"""Measures this machine as a job would use it, and writes the figures as a cluster file."""
