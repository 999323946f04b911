"""The commands of ``python -m meshstep.optim``.

python -m meshstep.optim report run.jsonl           # writes the curves of a run as an HTML page
python -m meshstep.optim compare A.jsonl B.jsonl    # finds the first difference of two runs
python -m meshstep.optim compare A.jsonl B.jsonl --json --tolerance bfloat16=0.1 --growth 0.2
"""

import sys

from .telemetry.command import main

if __name__ == "__main__":
    sys.exit(main())
