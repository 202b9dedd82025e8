"""``python -m autopar.launching JOB``: what ``autopar train`` does, with the job as JSON. Exported jobs start it."""

import sys

from autopar.launching.program import run_program

run_program(sys.argv[1])
