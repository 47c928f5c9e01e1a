"""Draw programs, faulty and swapped calls, altered files and faults for some minutes.

python -m tests.fuzz.run --minutes 30
python -m tests.fuzz.run --swaps 5000
python -m tests.fuzz.run --grids 500
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

from conftest import Worlds
from tests.faults.stage import problem, scenes
from tests.fuzz import faults, files, load, programs, swaps
from tests.grid import programs as grids

AT_ONCE = 50  # examples between two looks at the clock
FILES_AT_ONCE = 1000


def draw(run, job, pool, examples, number):
    """Run examples of one seed by ``run(pool, function, example)``; return them with answers."""
    found = []

    def example(drawn):
        found.append((drawn, run(pool, job.on_ranks, drawn)))

    programs.for_each(job.drawn(pool), examples, number, example)
    # a rank returns None if the operation has no such argument
    return [(drawn, answers) for drawn, answers in found if answers[0] is not None]


class Fuzz:
    """Jobs on ranks, and the numbers of runs and findings."""

    def __init__(self):
        self.worlds, self.tally, self.swapped = Worlds("gloo"), Counter(), Counter()

    def __str__(self):
        return ", ".join(f"{count:,} {name}" for name, count in self.tally.items())

    def found(self, name, text, kind="wrong"):
        self.tally[kind] += 1
        print(f"{name}: {text}", file=sys.stderr, flush=True)

    def run(self, size, *job):
        """Return the answers of all ranks; of a job that fails or hangs, None."""
        try:
            return self.worlds.run(size, *job, timeout=1200)
        except Exception as error:
            self.found(job, error, "hangs")
            self.worlds.close()
            return [None] * size

    def examples(self, name, job, number):
        drawn = draw(self.run, job, programs.POOL, AT_ONCE, number)
        self.tally[name] += len(drawn)
        for example, answers in drawn:
            if text := job.verdict(example, answers):
                self.found(f"seed {number}: {example}", text)

    def swaps(self, number):
        """Run swapped calls; where each kind was found is in `swapped`."""
        first = number * swaps.AT_ONCE
        answers = self.run(swaps.RANKS, swaps.on_ranks, range(first, first + swaps.AT_ONCE))
        if None in answers:
            return
        self.tally["swaps"] += swaps.AT_ONCE
        self.swapped.update(answers[0])
        for text in swaps.verdict(answers):
            self.found(f"seed {number}: swaps", text)

    def print_swaps(self):
        """Print where the swaps of each kind were found: at once, at a later sum, or never."""
        for name in swaps.KINDS:
            found = {where: n for (kind, where), n in sorted(self.swapped.items()) if kind == name}
            counts = ", ".join(f"{where or 'not found'} {n:,}" for where, n in found.items())
            print(f"swaps, {name}: {counts}", flush=True)

    def altered_files(self, number):
        for kind in files.SAVED:
            with tempfile.TemporaryDirectory() as folder:
                (answer,) = self.run(1, files.attempts, folder, kind, FILES_AT_ONCE, number)
            self.tally["altered files"] += FILES_AT_ONCE
            for text in answer[1] if answer else ():
                self.found(f"seed {number}: files of {kind}", text)

    def scenes(self):
        """Play every fault in every place."""
        command = [sys.executable, "-m", "tests.faults.stage"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        for scene, said in map(json.loads, done.stdout.splitlines()):
            self.tally["scenes"] += 1
            if text := problem(scene, said):
                self.found(scene, text, "hangs" if "not ended" in text else "wrong")
        if self.tally["scenes"] != len(scenes()):
            self.found("faults", f"{self} of {len(scenes())} scenes: {done.stderr[-2000:]}")

    def ended(self):
        """Print the counts, end the ranks, and return the exit status."""
        self.print_swaps()
        print(self, flush=True)
        self.worlds.close()
        return 1 if self.tally["hangs"] or self.tally["wrong"] else 0

    def load(self):
        """Run long jobs on 3 ranks twice; the second time, caches are full."""
        for name, (job, count, room) in load.JOBS.items():
            for most in (room, room // 4):
                for grown, right in filter(None, self.run(3, job, count)):
                    print(f"{count:,} {name}: bytes, files, threads: {grown}", flush=True)
                    if not right or grown[0] > most or any(grown[1:]):
                        self.found(name, (grown, right))
                self.tally[name] += count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first examples")
    parser.add_argument("--swaps", type=int, metavar="N", help="run as many swaps alone")
    parser.add_argument(
        "--grids", type=int, metavar="N", help="run as many programs of grids alone"
    )
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, torch {torch.__version__}", flush=True)
    fuzz, number = Fuzz(), options.seed
    if options.swaps is not None:
        for more in range(-(-options.swaps // swaps.AT_ONCE)):
            fuzz.swaps(number + more)
        return fuzz.ended()
    if options.grids is not None:
        for more in range(-(-options.grids // AT_ONCE)):
            fuzz.examples("programs of grids", grids, number + more)
        return fuzz.ended()
    end = time.monotonic() + 60 * options.minutes
    fuzz.scenes()
    print(fuzz, flush=True)
    fuzz.load()
    while time.monotonic() < end:
        fuzz.examples("programs", programs, number)
        fuzz.examples("programs of grids", grids, number)
        fuzz.examples("faulty calls", faults, number)
        fuzz.swaps(number)
        fuzz.altered_files(number)
        number += 1
        print(f"{fuzz}, up to seed {number - 1}", flush=True)
    return fuzz.ended()


if __name__ == "__main__":
    sys.exit(main())
