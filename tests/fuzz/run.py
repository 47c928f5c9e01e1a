"""Draw programs and faulty calls for some minutes, and count what went wrong.

python -m tests.fuzz.run --minutes 30
"""

import argparse
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

from conftest import Worlds
from tests.fuzz import faults, programs

AT_ONCE = 50  # examples, between two looks at the clock


class Tally:
    """What was run, and what was found."""

    def __init__(self) -> None:
        self.programs = self.faulty = self.hangs = self.wrong = 0

    def __str__(self) -> str:
        return (
            f"{self.programs} programs and {self.faulty} faulty calls: "
            f"{self.hangs} hangs, {self.wrong} wrong answers"
        )


def draw(worlds: Worlds, strategy, on_ranks, verdict, number: int, tally: Tally) -> int:
    """Run examples of one seed; how many there were."""
    made = 0

    @seed(number)
    @settings(
        max_examples=AT_ONCE,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=strategy)
    def examples(drawn):
        nonlocal made
        try:
            answers = worlds.run(programs.POOL, on_ranks, drawn, timeout=60)
        except Exception as error:
            tally.hangs += 1
            print(f"seed {number}: {drawn}\n{error}", file=sys.stderr)
            worlds.close()
            return
        if answers[0] is None:  # a call that has nothing of the kind
            return
        made += 1
        if problem := verdict(drawn, answers):
            tally.wrong += 1
            print(f"seed {number}: {drawn}\n{problem}", file=sys.stderr)

    examples()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first examples")
    options = parser.parse_args()
    tally, worlds, number = Tally(), Worlds("gloo"), options.seed
    end = time.monotonic() + 60 * options.minutes

    def differing(_, answers):
        return "; ".join(text for text in answers if text)

    while time.monotonic() < end:
        tally.programs += draw(
            worlds, programs.programs(), programs.on_ranks, differing, number, tally
        )
        tally.faulty += draw(
            worlds, faults.faults(), faults.on_ranks, faults.verdict, number, tally
        )
        number += 1
        print(f"{tally}, up to seed {number - 1}", flush=True)
    worlds.close()
    return 1 if tally.hangs or tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
