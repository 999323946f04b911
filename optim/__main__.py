"""The command ``python -m meshstep.optim report run.jsonl``, which writes the curves of a run as an HTML page."""

import sys

from .telemetry.page import main

if __name__ == "__main__":
    sys.exit(main())
