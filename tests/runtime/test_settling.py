"""A process that ends with works of gloo still to be done ends well."""

from __future__ import annotations

import sys

import pytest

from tests.patience import run

# Each child leaves a queue of gathers to threads of gloo, which alone hold what they gather into. Without waiting every
# second child is aborted.
CHILDREN = """
import os, sys
import torch
import torch.distributed as dist
from autopar.runtime.launch import ensure_process_group

torch.set_num_threads(1)
codes = []
for _ in range(8):
    child = os.fork()
    if not child:
        ensure_process_group()
        row = torch.ones(1 << 20)
        for _ in range(300):
            dist.all_gather([torch.empty(1 << 20)], row, async_op=True)
        break
    codes.append(os.waitpid(child, 0)[1])
else:
    print(codes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at in /proc")
def test_the_end_of_a_process_waits_for_threads_that_hold_tensors() -> None:
    done = run(sys.executable, "-c", CHILDREN)
    assert done.stdout.split("\n")[0] == str([0] * 8), done.stdout + done.stderr
