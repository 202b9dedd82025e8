"""``python -m autopar.launching JOB [PARENT]``: what ``autopar train`` does, with the job as JSON.

Exported jobs and actors of Ray start it. PARENT: the process with which this one is to end.
"""

import sys

from autopar.launching.program import run_program
from autopar.process_end import end_with

for parent in sys.argv[2:]:
    end_with(int(parent))
run_program(sys.argv[1])
