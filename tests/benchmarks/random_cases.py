"""Run random cases of a property test by number, and print the numbers and problems of the cases that fail.

    python tests/benchmarks/random_cases.py {steps,clip} [--start 0] [--count 1000]

    steps    tests/optim/test_any_configuration.py: steps, norms, replicas and checkpoints of random configurations
    clip     tests/optim/clip/test_random_meshes.py: clip_grad_norm_ without a registry on random meshes

A number always draws the same case, so ``--start NUMBER --count 1`` runs a failed case again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "optim" / "clip"))
sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))
sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from configurations import case_of
from random_meshes import mesh_case
from tqdm import tqdm
from world import World, WorldError

Check = Callable[[World, Sequence[int]], list[list[str]]]

# These modules are imported by name, because the type checker finds test files only by their paths.
test_any_configuration: Any = import_module("test_any_configuration")
test_random_meshes: Any = import_module("test_random_meshes")

CHECKS: dict[str, Check] = {
    "steps": lambda world, numbers: test_any_configuration.problems_of_each(world, [*map(case_of, numbers)]),
    "clip": lambda world, numbers: test_random_meshes.problems_of_meshes(world, [*map(mesh_case, numbers)]),
}


def failures(check: Check, world: World, numbers: Sequence[int]) -> dict[int, list[str]]:
    """Return the problems of each failed case by number. If a call with several cases raises, each case runs alone."""
    try:
        return {number: found for number, found in zip(numbers, check(world, numbers), strict=True) if found}
    except (WorldError, AssertionError) as error:
        if len(numbers) == 1:
            return {numbers[0]: [f"{type(error).__name__}: {error}"]}
    return {key: found for number in numbers for key, found in failures(check, world, [number]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    numbers = range(options.start, options.start + options.count)
    world, failed = World(), 0
    for first in tqdm(numbers[::20], desc=f"{options.check}, 20 cases each"):
        found = failures(CHECKS[options.check], world, [*range(first, min(first + 20, numbers.stop))])
        failed += len(found)
        for number, problems in found.items():
            print(f"case {number}: {problems}", flush=True)
    world.close()
    print(f"{len(numbers)} cases from {options.start}: {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
