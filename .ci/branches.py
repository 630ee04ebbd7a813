"""Print the share of branches that the tests took, of coverage's JSON report. Exit status 1 below 90%.

.ci/branches.py build/coverage.json
"""

import json
import sys
from pathlib import Path

FLOOR = 0.9

totals = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["totals"]
share = totals["covered_branches"] / totals["num_branches"]
print(f"{share:.1%} of {totals['num_branches']:,} branches of codec, manager and policies were taken")
sys.exit(share < FLOOR)
