"""``python -m autopar.training JOB``: one rank, with the job as JSON. ``autopar train`` starts these.

A rank ends without taking the interpreter apart. Python ends a thread of torch that asks for its lock meanwhile, inside
C++ that does not expect it, and the process aborts: seen once in some thousand trainings, after the last step.
"""

import atexit
import os
import sys

from autopar.training.job import TrainingJob
from autopar.training.rank import run_rank

code = run_rank(TrainingJob.from_json(sys.argv[1]))
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
