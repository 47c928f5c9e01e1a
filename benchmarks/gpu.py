"""Measure primitives and plans on the GPUs of this machine, and write docs/benchmarks/gpu.md.

    python benchmarks/gpu.py [--page FILE] [--seconds 0.2]

NCCL serves one rank per GPU. Two ranks share a GPU through Gloo and pinned memory. The run takes
about five minutes on one GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

import varcomm as vc
from varcomm.cli import bench
from varcomm.cli.workload import OPERATIONS, Case

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "gpu.md"
SIZES = (16 << 10, 1 << 20, 64 << 20)
STAGED = ("all_gather_v", "reduce_scatter_v", "halo")
HEAD = "| operation | pass | ranks | dtype | bytes | shards | us | algbw | busbw | wire |"


def measured(engine: str, ranks: int, operations: tuple[str, ...], seconds: float) -> Iterator[str]:
    """Yield the rows of a table, in the columns of `varcomm bench`."""
    yield HEAD
    yield "|" + " --- |" * HEAD[1:-1].count("|") + " --- |"
    device = torch.device("cuda", 0) if engine == "gloo" else None
    skews = ["even", "1:8"] if ranks > 1 else ["even"]
    with vc.Ranks(ranks, 600, backend=engine) as pool:
        for name, backward, nbytes, weights in product(operations, (False, True), SIZES, skews):
            case = Case(name, backward, ranks, engine, "float32", nbytes, weights, "ops")
            result = pool.run(bench.measure, case, seconds, None, device)[0]
            yield f"| {' | '.join(bench.cells(result))} |"
            print(*bench.cells(result), file=sys.stderr, flush=True)


def page(seconds: float) -> Iterator[str]:
    """Yield the lines of the page."""
    gpus = torch.cuda.device_count()
    yield "# GPUs\n"
    yield f"Written by `make test-gpu` on {gpus} x {torch.cuda.get_device_name()}, torch"
    yield f"{torch.__version__}, CUDA {torch.version.cuda}, after the tests of NCCL and of CUDA"
    yield "graphs passed there. The columns are those of nccl-tests, as `varcomm bench` has them;"
    yield "times are medians, of the slowest rank.\n"
    yield f"## NCCL, {gpus} {'rank' if gpus == 1 else 'ranks, one per GPU'}\n"
    yield from measured("nccl", gpus, tuple(OPERATIONS), seconds)
    yield "\n## Gloo through pinned memory, 2 ranks on one GPU\n"
    yield from measured("gloo", 2, STAGED, seconds)


def main() -> None:
    """Write the page if there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write")
    parser.add_argument("--seconds", type=float, default=0.2, help="time for a case")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use")
    options.page.write_text("\n".join(page(options.seconds)) + "\n")


if __name__ == "__main__":
    main()
