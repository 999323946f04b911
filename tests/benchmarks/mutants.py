"""Measure the detection rate of `prove` on random models with one planted mistake, and its errors on correct models.

    python tests/benchmarks/mutants.py [--mutants 200] [--right 200] [--start 0]

The counts per kind of mistake: planted, detected, with exactly the wrong parameters named, with the right cause. Each
mistake that lacks one of these is printed, and so is each error on a correct model.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from mutants import mutated
from proof_models import drawn_model, proved
from tqdm import tqdm
from world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--right", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    world = World()
    alarms = [0, 0]
    for number in tqdm(range(options.start, options.start + options.right), desc="right models"):
        proof = world.run(drawn_model(number).topology.world_size, proved, number)[0]
        alarms[0 if proof.is_correct else 1] += 1
        if not proof.is_correct:
            print(f"{drawn_model(number)}:\n{proof}\n")
    counts: dict[str, Counter[str]] = {}
    number, made = options.start, 0
    with tqdm(total=options.mutants, desc="mutants") as bar:
        while made < options.mutants:
            outcome = world.run(drawn_model(number).topology.world_size, mutated, number)[0]
            number += 1
            if outcome is None:
                continue
            made += 1
            bar.update()
            told = {"made": True, "found": outcome.found, "named": outcome.named, "cause": outcome.cause}
            for kind in (outcome.kind, "all"):
                counts.setdefault(kind, Counter()).update({name: int(value) for name, value in told.items()})
            if not all(told.values()):
                print(f"model {number - 1}, {outcome.kind}, {outcome.family}: {told}\n{outcome.text}\n")
    world.close()
    print(f"right models: {alarms[0]} proved, {alarms[1]} false alarms")
    print(f"{'mistake':28}" + "".join(f"{name:>8}" for name in ("made", "found", "named", "cause")))
    for kind, counted in sorted(counts.items()):
        print(f"{kind:28}" + "".join(f"{counted[name]:8}" for name in ("made", "found", "named", "cause")))


if __name__ == "__main__":
    main()
