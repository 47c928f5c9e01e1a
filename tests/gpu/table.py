"""Write the looks in docs/benchmarks/gpu.md, of all scenarios: ``python -m tests.gpu.table``."""

from pathlib import Path

import torch

import varcomm
from tests.gpu.check import second_step
from tests.gpu.scenarios import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu.md"
RANKS = 2

# The page says what is above this line; the script writes what follows it.
LAST = "leaves the GPU idle, and a CUDA graph refuses it.\n"
MEASURED = """
{summary}

This table is generated: `python -m tests.gpu.table` runs each scenario on {ranks} ranks, and counts
the looks of the second step on the rank with the most. The column *allowed* is the limit that
`tests/gpu/test_scenarios.py` checks. A scenario of set-up functions has no limit.
"""


def rows(pool):
    """Yield a name, the looks of the second step, and a scenario."""
    for name, scenario in SCENARIOS.items():
        found = pool.run(second_step, RANKS, name, timeout=60)
        print(name, max(map(len, found)), flush=True)
        yield name, max(map(len, found)), scenario


def _words(name):
    return name.replace("_", " ")


def page(measured):
    """Return the text of the page: its own, then what is measured."""
    measured, own = list(measured), PAGE.read_text().partition(LAST)[0]
    counted = [(name, looks, s) for name, looks, s in measured if s.looks is not None]
    none = sum(looks == 0 for _, looks, _ in counted)
    others = [f"- {_words(name)}: {looks}, {s.reason}" for name, looks, s in counted if looks]
    summary = f"Of {len(counted)} scenarios of a training step, {none} have no look."
    if others:
        summary += " The others are:\n\n" + "\n".join(others)
    lines = [
        own + LAST + MEASURED.format(summary=summary, ranks=RANKS),
        f"torch {torch.__version__}, {RANKS} ranks.\n",
        "| scenario | public names | looks | allowed |",
        "| --- | --- | --- | --- |",
    ]
    for name, looks, s in measured:
        names = ", ".join(f"`{covered}`" for covered in s.covers)
        allowed = "-" if s.looks is None else s.looks
        lines.append(f"| {_words(name)} | {names} | {looks} | {allowed} |")
    return "\n".join(lines) + "\n"


def main():
    torch.set_num_threads(1)
    with varcomm.Ranks(RANKS, timeout=600, backend="gloo") as pool:
        PAGE.write_text(page(rows(pool)))


if __name__ == "__main__":
    main()
