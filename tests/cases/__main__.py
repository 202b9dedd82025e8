"""Run cases under plans and print what became of each cell.

python -m tests.cases NAME [NAME ...] [--plans dp2,zero3]        all cases if none is named
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.parity import PLANS, expected, run_cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--verbose", action="store_true", help="whole messages and tracebacks")
    options = parser.parse_args()
    cases = options.cases or sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    wrong = 0
    for cell in run_cells(cases, options.plans.split(",")):
        verdict, text = expected(cell.case, cell.plan)
        right = cell.verdict == verdict and text in cell.text
        wrong += not right
        print(f"{'    ' if right else 'NOT '}{cell}", flush=True)
        if not right and verdict != "exact":
            print(f"      expected: {verdict}, with {text!r}")
        if options.verbose and cell.text:
            print(cell.text)
    print(f"{wrong} cells are not as expected")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
