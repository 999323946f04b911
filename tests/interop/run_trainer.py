"""Steps of the Trainer of Transformers, stock and with the recipe, in one start of two processes.

run_trainer.py MODEL FOLDER writes norms and weights of each run into FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

import torch
from trainer_runs import run


def main(path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    found = {
        "stock": run(path, folder / "stock", False),
        "whole": run(path, folder / "whole", True),
        "whole, resumed": run(path, folder / "whole", True, resume=True),
        "stock, sharded": run(path, folder / "stock, sharded", False, (2, 1)),
        "sharded": run(path, folder / "sharded", True, (2, 1)),
        "sharded, resumed": run(path, folder / "sharded", True, (2, 1), resume=True),
        "tensor parallel": run(path, folder / "tensor", True, (1, 2)),
    }
    torch.save(found, folder / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
