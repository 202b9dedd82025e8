"""``python -m autopar.launching JOB [PARENT]``: what ``autopar train`` does, with the job as JSON.

Exported jobs and actors of Ray start it. PARENT: the process with which this one is to end.
"""

import json
import os
import sys

from autopar.process_end import end_with
from autopar.supervision.local_workers import is_to_wait, wait_for_supervisor


def main() -> None:
    """Of this process."""
    for parent in sys.argv[2:]:
        end_with(int(parent))
    if is_to_wait(os.environ) and json.loads(sys.argv[1]).get("keep_alive"):
        wait_for_supervisor()
    from autopar.launching.program import run_program  # imports torch, which one that waits does without

    run_program(sys.argv[1])


main()
