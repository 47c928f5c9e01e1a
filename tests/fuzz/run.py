"""Draw programs, faulty calls, altered files and faults for some minutes; count what went wrong.

python -m tests.fuzz.run --minutes 30
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from conftest import Worlds
from tests.faults.judging import problem
from tests.faults.stage import scenes
from tests.fuzz import faults, files, load, programs

AT_ONCE = 50  # examples, between two looks at the clock
FILES_AT_ONCE = 1000
MEGABYTE = 1 << 20


@dataclass
class Tally:
    """What was run, and what was found."""

    programs: int = 0
    faulty_calls: int = 0
    altered_files: int = 0
    scenes: int = 0
    collectives: int = 0
    plans: int = 0
    groups: int = 0
    refusals: int = 0
    hangs: int = 0
    wrong: int = 0

    def __str__(self) -> str:
        return ", ".join(
            f"{getattr(self, one.name):,} {one.name.replace('_', ' ')}" for one in fields(self)
        )

    def found(self, what: str, problem: object, hangs: bool = False) -> None:
        """Note something that is wrong."""
        self.hangs += hangs
        self.wrong += not hangs
        print(f"{what}: {problem}", file=sys.stderr, flush=True)


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
            tally.found(f"seed {number}: {drawn}", error, hangs=True)
            worlds.close()
            return
        if answers[0] is None:  # a call that has nothing of the kind
            return
        made += 1
        if problem := verdict(drawn, answers):
            tally.found(f"seed {number}: {drawn}", problem)

    examples()
    return made


def differing(_, answers):
    return "; ".join(text for text in answers if text)


def read_altered_files(worlds: Worlds, number: int, tally: Tally) -> None:
    for kind in files.SAVED:
        with tempfile.TemporaryDirectory() as folder:
            job = files.attempts, folder, kind, FILES_AT_ONCE, number
            try:
                _, wrong = worlds.run(1, *job, timeout=600)[0]
            except Exception as error:
                tally.found(f"seed {number}: files of {kind}", error, hangs=True)
                worlds.close()
                continue
            tally.altered_files += FILES_AT_ONCE
            for problem in wrong:
                tally.found(f"seed {number}: files of {kind}", problem)


def play_scenes(tally: Tally) -> None:
    """Every fault in every place."""
    command = [sys.executable, "-m", "tests.faults.stage"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    for line in done.stdout.splitlines():
        scene, told = json.loads(line)
        tally.scenes += 1
        if text := problem(scene, told):
            tally.found(scene, text, hangs="not ended" in text)
    if tally.scenes != len(scenes()):
        tally.found("faults", f"{tally.scenes} of {len(scenes())} scenes: {done.stderr[-2000:]}")


def carry_load(worlds: Worlds, tally: Tally) -> None:
    """A long time in a row, on 3 ranks; then once more, when all that is kept has been made."""
    for what, job, count, room in (
        ("collectives", load.collectives, 10_000, 4 * MEGABYTE),
        ("plans", load.plans, 200, 2 * MEGABYTE),
        ("groups", load.groups, 100, 4 * MEGABYTE),
        ("refusals", load.refusals, 1000, 2 * MEGABYTE),
    ):
        for most in (room, room // 4):
            for rank, (grown, right) in enumerate(worlds.run(3, job, count, timeout=1200)):
                print(f"{count:,} {what}, rank {rank}: bytes, files, threads: {grown}", flush=True)
                if not right or grown[0] > most or any(grown[1:]):
                    tally.found(what, (rank, grown, right))
            setattr(tally, what, getattr(tally, what) + count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first examples")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, torch {torch.__version__}", flush=True)
    tally, worlds, number = Tally(), Worlds("gloo"), options.seed
    end = time.monotonic() + 60 * options.minutes
    play_scenes(tally)
    print(tally, flush=True)
    carry_load(worlds, tally)
    while time.monotonic() < end:
        tally.programs += draw(
            worlds, programs.programs(), programs.on_ranks, differing, number, tally
        )
        tally.faulty_calls += draw(
            worlds, faults.faults(), faults.on_ranks, faults.verdict, number, tally
        )
        read_altered_files(worlds, number, tally)
        number += 1
        print(f"{tally}, up to seed {number - 1}", flush=True)
    worlds.close()
    return 1 if tally.hangs or tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
