"""``python -m meshstep.optim report run.jsonl``."""

import sys

from .telemetry.page import main

if __name__ == "__main__":
    sys.exit(main())
