"""``python -m autopar.training JOB``: one rank, with the job as JSON. ``autopar train`` starts these."""

import os
import sys

from autopar.process_end import end_process, end_with
from autopar.training.job import TrainingJob
from autopar.training.rank import run_rank

end_with(os.getppid())
end_process(run_rank(TrainingJob.from_json(sys.argv[1])))
