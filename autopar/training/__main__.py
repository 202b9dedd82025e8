"""``python -m autopar.training JOB``: one rank, with the job as JSON. ``autopar train`` starts these."""

import sys

from autopar.process_end import end_process
from autopar.training.job import TrainingJob
from autopar.training.rank import run_rank

end_process(run_rank(TrainingJob.from_json(sys.argv[1])))
