"""Write docs/benchmarks/gpu.md from a run of all scenarios: ``python -m tests.gpu.table``."""

from pathlib import Path

import torch

import varcomm
from tests.gpu.check import second_step
from tests.gpu.scenarios import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu.md"
RANKS = 2

HEAD = """# GPUs

You want to know what has run on a GPU, and how often a training step makes the host wait for one.

**Status.** On 2026-11-27 `make test-gpu` ran on one NVIDIA H200 with torch 2.11.0, CUDA 13.0 and
NCCL 2.28.9, without an installation. All 17 cases of [right](gpu/right.md) passed. Two and three
ranks of NCCL shared the GPU. 99 scenarios gave the values of the CPU without a wait of the host.
Captured steps replayed, also with messages of NCCL in the graph. [Fast](gpu/fast.md) has times and
memory. No machine with several GPUs was available, so [several GPUs](gpu/several.md) has not
run.

The first run showed:

- No value differs from that of the CPU beyond rounding. One scenario had to change: PyG keeps the
  weight of one self loop of a node, and on a GPU it is any of them.
- Of the first tier of `tests/graph`, `tensor_parallel`, `data_parallel`, `checkpoint`, `sharding`
  and `transforms`, run with `--device cuda:0`, 428 tests passed. The others mix tensors of the CPU
  and the GPU by themselves, or need packages that were missing; none failed for its values.
- From 1,000,000 edges on, a distributed step of MeshGraphNet or GAT takes 1.01 to 1.02 times the
  plain one. At 100,000 edges the host limits both, and the ratio is 1.7 to 2.2. A captured step
  takes 0.25 to 0.66 times the plain one there.
- Compiled, at 1,000,000 edges: MeshGraphNet 1.02, GAT 1.00, GraphSAGE 1.50 times plain (3.86 ms and
  2.60 ms).
- The cross entropy of 4,096 tokens and 32,003 classes took 5.9 times as long as torch's, in 8
  chunks of many small kernels. In 2 chunks it takes 3.8 times as long, with half of the memory.
- A sum of 1,000,000 rows of 4 numbers takes 119 us in a fixed order, and 29 us with `index_add_`,
  whose order is not fixed. A sum of 8 parts takes 59 us in a kernel per part, and 9 us in one.

On machines without a GPU, the NCCL path is tested in two ways:

- `make test-nccl` runs `varcomm/transport/engines/nccl.py` over a strict stand-in for NCCL. The
  stand-in checks split sizes, dtypes, devices, contiguity and the order of calls per communicator.
  It fills an output with garbage until `wait()`, and raises an error if a sent tensor changes
  before.
- `tests/gpu` runs every public function with tensors that say they are on `cuda:0`. An operation
  that mixes them with CPU tensors raises an error. Values and gradients are compared with a run on
  the CPU.

## Looks at values per step

A *look* is an operation for which the host waits until the GPU has finished its work: `.item()`,
`.tolist()`, `bool(tensor)`, `nonzero`, an index by a mask, a copy between CPU and GPU. A look
leaves the GPU idle, and a CUDA graph refuses it.

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
    """Return the text of the page."""
    measured = list(measured)
    counted = [(name, looks, s) for name, looks, s in measured if s.looks is not None]
    none = sum(looks == 0 for _, looks, _ in counted)
    others = [f"- {_words(name)}: {looks}, {s.reason}" for name, looks, s in counted if looks]
    summary = f"Of {len(counted)} scenarios of a training step, {none} have no look."
    if others:
        summary += " The others are:\n\n" + "\n".join(others)
    lines = [
        HEAD.format(summary=summary, ranks=RANKS),
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
