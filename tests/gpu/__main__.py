"""Run these tests from a plain checkout. They need only torch and pytest, and no network.

python -m tests.gpu                                          on one GPU, and smaller tests on the CPU
python -m tests.gpu -m cuda                                  without the CPU; arguments go to pytest
python -m tests.gpu --all                                    all tests and benchmarks in nine minutes, see everything.py
torchrun --standalone --nproc-per-node 4 -m tests.gpu        on several GPUs, over NCCL: other tests
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.gpu import everything

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"


def make_importable(beside: Path) -> None:
    """Make `meshstep` importable here and in child processes, like an editable install, by links in an empty folder."""
    (beside / "meshstep").mkdir()
    src = ROOT / "src" / "meshstep"
    for source in (src / "__init__.py", src / "testing", *(ROOT / name for name in ("parallel", "amp", "optim"))):
        (beside / "meshstep" / source.name).symlink_to(source, target_is_directory=source.is_dir())
    paths = [str(beside), str(ROOT / "tests" / "harness")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def what_runs() -> str:
    """Return the folder of the sources, the version of torch, and the GPU."""
    import torch
    from meshstep import optim

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"meshstep of {Path(optim.__path__[0]).resolve()}, torch {torch.__version__}, {gpu}"


def main(arguments: list[str]) -> int:
    """Run pytest on the files among the arguments, by default on all files, and return its exit status."""
    if "--all" in arguments:
        return everything.main([argument for argument in arguments if argument != "--all"])
    try:
        import pytest
    except ImportError:
        print("tests.gpu needs pytest: python -m pip install pytest", file=sys.stderr)
        return 2
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no plugin is needed, and some would import missing packages
    under_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    files = [argument for argument in arguments if argument.partition("::")[0].endswith(".py")]
    arguments = [argument for argument in arguments if argument not in files]
    chosen = [GPU / name for name in files] or [GPU / "test_gpu_torchrun.py" if under_torchrun else GPU]
    with tempfile.TemporaryDirectory() as folder:
        make_importable(Path(folder))
        print(what_runs(), flush=True)
        # Without tests/conftest.py, which needs hypothesis; warnings of other torch versions are not errors here.
        own = ["--confcutdir", str(GPU), "-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
        return int(pytest.main([*map(str, chosen), "--rootdir", str(ROOT), *own, "-rs", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
