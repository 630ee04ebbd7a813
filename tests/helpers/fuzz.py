"""Run the state machines of machine.py for long: `python tests/helpers/fuzz.py --steps 1000000`, or `make fuzz`.

Each round is one seed of one configuration. A round that fails prints how to run it again, and the calls that lead
there.
"""

import argparse
import sys
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))
from machine import CONFIGURATIONS, PROFILE, Sessions


def run(machine: type[Sessions], number: int, profile: settings = PROFILE) -> Counter[str]:
    """Run a round with this seed. Return what came to pass. Raises what the machine raises."""
    seen: Counter[str] = Counter()
    before = machine.steps

    class Watched(machine):  # type: ignore[valid-type, misc]
        def teardown(self) -> None:
            super().teardown()
            seen.update(self.world.seen)

    Watched.__name__ = machine.__name__
    run_state_machine_as_test(seed(number)(Watched), settings=profile)
    seen["steps"] = Watched.steps - before
    return seen


def main() -> None:
    """Run rounds until the steps are done, or one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--only", choices=CONFIGURATIONS, help="the only configuration to be run")
    parser.add_argument("--shrink", action="store_true", help="look for a short way to a failure, for minutes")
    args = parser.parse_args()
    profile = settings(PROFILE, phases=[Phase.generate, Phase.shrink] if args.shrink else PROFILE.phases)
    seen: dict[str, Counter[str]] = {name: Counter() for name in ([args.only] if args.only else CONFIGURATIONS)}
    began, number = time.monotonic(), args.seed
    for name in cycle(seen):
        try:
            seen[name] += run(CONFIGURATIONS[name], number, profile)
        except BaseException:
            print(f"FAILED: python tests/helpers/fuzz.py --only {name} --seed {number} --steps 1 --shrink", flush=True)
            raise
        done = sum(counts["steps"] for counts in seen.values())
        if name == list(seen)[-1]:
            print(f"{done} steps, seed {number}, {time.monotonic() - began:.0f} s", flush=True)
            number += 1
        if done >= args.steps:
            break
    for name, counts in seen.items():
        print(f"{name}: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
