"""Draw programs, faulty calls, altered files and faults for some minutes; count failures.

python -m tests.fuzz.run --minutes 30
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from conftest import Worlds
from tests.faults.stage import problem, scenes
from tests.fuzz import faults, files, load, programs

AT_ONCE = 50  # examples, between two looks at the clock
FILES_AT_ONCE = 1000
MEGABYTE = 1 << 20


class Tally(Counter):
    """Numbers of runs and findings by name."""

    def __str__(self):
        return ", ".join(f"{count:,} {name}" for name, count in self.items())

    def found(self, name, problem, kind="wrong"):
        self[kind] += 1
        print(f"{name}: {problem}", file=sys.stderr, flush=True)


def draw(worlds, name, strategy, on_ranks, verdict, number, tally):
    """Run examples of one seed."""

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
        try:
            answers = worlds.run(programs.POOL, on_ranks, drawn, timeout=60)
        except Exception as error:
            tally.found(f"seed {number}: {drawn}", error, "hangs")
            worlds.close()
            return
        if answers[0] is None:  # the operation has no such argument
            return
        tally[name] += 1
        if problem := verdict(drawn, answers):
            tally.found(f"seed {number}: {drawn}", problem)

    examples()


def differing(_, answers):
    return "; ".join(text for text in answers if text)


def read_altered_files(worlds, number, tally):
    for kind in files.SAVED:
        with tempfile.TemporaryDirectory() as folder:
            job = files.attempts, folder, kind, FILES_AT_ONCE, number
            try:
                _, wrong = worlds.run(1, *job, timeout=600)[0]
            except Exception as error:
                tally.found(f"seed {number}: files of {kind}", error, "hangs")
                worlds.close()
                continue
            tally["altered files"] += FILES_AT_ONCE
            for problem in wrong:
                tally.found(f"seed {number}: files of {kind}", problem)


def play_scenes(tally):
    """Every fault in every place."""
    command = [sys.executable, "-m", "tests.faults.stage"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    for line in done.stdout.splitlines():
        scene, told = json.loads(line)
        tally["scenes"] += 1
        if text := problem(scene, told):
            tally.found(scene, text, "hangs" if "not ended" in text else "wrong")
    if tally["scenes"] != len(scenes()):
        tally.found("faults", f"{tally['scenes']} of {len(scenes())} scenes: {done.stderr[-2000:]}")


def carry_load(worlds, tally):
    """Run long jobs on 3 ranks twice; the second time, caches are full."""
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
            tally[what] += count


def main():
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
        for name, strategy, on_ranks, verdict in (
            ("programs", programs.programs(), programs.on_ranks, differing),
            ("faulty calls", faults.faults(), faults.on_ranks, faults.verdict),
        ):
            draw(worlds, name, strategy, on_ranks, verdict, number, tally)
        read_altered_files(worlds, number, tally)
        number += 1
        print(f"{tally}, up to seed {number - 1}", flush=True)
    worlds.close()
    return 1 if tally["hangs"] or tally["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
