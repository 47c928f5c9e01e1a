"""Time and memory per step of each example on 1, 2 and 4 ranks: the tables of the READMEs.

``python benchmarks/examples.py`` runs the first command of each README with few steps, in sequence,
and prints a table in Markdown for each.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# other options that set numbers of steps
MORE = {"atoms": ["--moves", "5"], "text": ["--sample", "2"]}
COST = re.compile(r"([\d.]+) s per step, the median of \d+; at most (.*) MiB per rank")


def command(folder):
    """Return the words of the first command of a README, without the launcher."""
    text = (folder / "README.md").read_text()
    line = re.search(r"^ {4}torchrun --nproc-per-node \d+ (.*?)(?:\s+#.*)?$", text, re.MULTILINE)
    return shlex.split(line[1]) if line else None


def cost(words, ranks, steps, scratch):
    """Return the seconds of the median step and the MiB of each rank, for each kind of step."""
    script, *options = words
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(ROOT / script), *options, "--steps", str(steps)),
        ],
        cwd=scratch,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    found = COST.findall(done.stdout)
    if not found:
        sys.exit(f"{script} on {ranks} ranks:\n{done.stdout}\n{done.stderr}")
    return " / ".join(seconds for seconds, _ in found), found[-1][1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = {
        folder.name: command(folder) for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir()
    }
    commands = {name: words for name, words in commands.items() if words}
    parser.add_argument("examples", nargs="*", default=[*commands], help="all that train")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    for name in options.examples:
        words = [*commands[name], *MORE.get(name, [])]
        print(f"\n{name}: {' '.join(words)} --steps {options.steps}\n")
        print("| ranks | seconds per step | peak MiB per rank |\n| --- | --- | --- |", flush=True)
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as scratch:
                seconds, memory = cost(words, ranks, options.steps, scratch)
            print(f"| {ranks} | {seconds} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
