"""``python -m autopar.training JOB``: one rank, with the job as JSON. ``autopar train`` starts these."""

import sys

from autopar.training.job import TrainingJob
from autopar.training.rank import run_rank

sys.exit(run_rank(TrainingJob.from_json(sys.argv[1])))
