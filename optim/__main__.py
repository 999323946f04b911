"""``python -m meshstep.optim report run.jsonl``."""

import sys

from .telemetry.command import main

if __name__ == "__main__":
    sys.exit(main())
