"""Command line ``python -m meshstep.testing audit SCRIPT:BUILD --topology AXIS=SIZE,...``: check a model's layouts."""

import sys

from ..optim.proof.command import main

if __name__ == "__main__":
    sys.exit(main())
