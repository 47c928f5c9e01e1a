"""Parallel linears beside what they are made of: ``python benchmarks/linears.py``.

Forward and backward of each kind, beside the floor: the dense products of the local block and the
bare collectives, calls of torch.distributed into memory that is there already, one after the other;
and beside the same made of varcomm's operators, where nothing overlaps. Then the fused paths of
inference beside the layers one after the other. All of one table take turns, since machines are
noisy. A rank has one thread; what an engine does on threads of its own needs a core too.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from itertools import accumulate

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from measuring import machine, median, table
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

import varcomm as vc
from varcomm.tensor_parallel import (
    column_parallel_linear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    row_parallel_linear,
)
from varcomm.tensor_parallel.inference import Buffers, norm_column_linear, row_linear_norm

FLOOR = "products, then collectives"
AGAIN = "column_parallel_linear, gathers again"


def uneven(total, ranks):
    """Sizes of which every second is two thirds of the others."""
    weights = [3 - rank % 2 for rank in range(ranks)]
    ends = [total * sum(weights[: rank + 1]) // sum(weights) for rank in range(ranks)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass
class Case:
    """Tensors of one rank: a sequence of T rows, K inputs, N outputs, each in uneven parts."""

    rank: int
    rows: list[int]
    inputs: list[int]
    outputs: list[int]

    def __post_init__(self):
        rank, total = self.rank, sum(self.rows)
        self.k, self.n = self.inputs[rank], self.outputs[rank]

        def made(*shape, scale=1.0):
            return (torch.randn(*shape) * scale).requires_grad_()

        self.x = made(total, sum(self.inputs))
        self.part = made(self.rows[rank], sum(self.inputs))
        self.columns = made(total, self.k)
        self.weight = made(self.n, sum(self.inputs), scale=sum(self.inputs) ** -0.5)
        self.across = made(sum(self.outputs), self.k, scale=sum(self.inputs) ** -0.5)

    def ways(self):
        """By kind: whatever computes it, forward and backward, as functions of nothing."""
        rows, whole = self.rows, sum(self.rows)
        of_column = torch.randn(whole, self.n)
        of_row = torch.randn(whole, sum(self.outputs))
        of_part = torch.randn(rows[self.rank], sum(self.outputs))
        x, part, columns, weight, across = (
            self.x,
            self.part,
            self.columns,
            self.weight,
            self.across,
        )

        def both(fn, a, w, gradient):
            def way():
                y = fn(a, w)
                return y.detach(), *torch.autograd.grad(y, (a, w), gradient)

            return way

        def reduced(a, w):
            return reduce_from_tensor_model_parallel_region(linear(a, w))

        return {
            "column": {
                FLOOR: Floor(x, weight, of_column, backward=all_reduce_into),
                "of operators": both(
                    lambda a, w: linear(copy_to_tensor_model_parallel_region(a), w),
                    *(x, weight, of_column),
                ),
                "column_parallel_linear": both(column_parallel_linear, x, weight, of_column),
            },
            "column of a sequence": {
                FLOOR: Floor(
                    *(part, weight, of_column),
                    forward=Gather(rows, part.shape[1]),
                    backward=Scatter(rows, part.shape[1]),
                ),
                "of operators": both(
                    lambda a, w: linear(vc.all_gather_v(a, rows), w), part, weight, of_column
                ),
                "column_parallel_linear, keeps": both(
                    lambda a, w: column_parallel_linear(a, w, sequence_sizes=rows, save="gathered"),
                    *(part, weight, of_column),
                ),
                AGAIN: both(
                    lambda a, w: column_parallel_linear(a, w, sequence_sizes=rows),
                    *(part, weight, of_column),
                ),
            },
            "row": {
                FLOOR: Floor(columns, across, of_row, after=all_reduce_into),
                "of operators": both(reduced, columns, across, of_row),
                "row_parallel_linear": both(row_parallel_linear, columns, across, of_row),
            },
            "row to a sequence": {
                FLOOR: Floor(
                    *(columns, across, of_part),
                    after=Scatter(rows, across.shape[0]),
                    before=Gather(rows, across.shape[0]),
                ),
                "of operators": both(
                    lambda a, w: vc.reduce_scatter_v(linear(a, w), rows), columns, across, of_part
                ),
                "row_parallel_linear": both(
                    lambda a, w: row_parallel_linear(a, w, sequence_sizes=rows),
                    *(columns, across, of_part),
                ),
            },
        }

    def bounds(self):
        """Fewest elements that a rank sends and receives, by kind: each of its collectives."""
        t, mine, peers = sum(self.rows), self.rows[self.rank], len(self.rows) - 1
        gather = (mine * peers, t - mine)
        scatter = gather[::-1]
        k, n = sum(self.inputs), sum(self.outputs)
        pieces = 2 * t * peers / (peers + 1)
        summed = (pieces, pieces)
        return {
            "column": [times(summed, k)],
            "column of a sequence": [times(gather, k), times(scatter, k)],
            AGAIN: [times(gather, k), times(gather, k), times(scatter, k)],
            "row": [times(summed, n)],
            "row to a sequence": [times(scatter, n), times(gather, n)],
        }


def times(pair, width):
    return pair[0] * width, pair[1] * width


class Gather:
    """Uneven rows of all ranks: broadcasts into their places, all under way together."""

    def __init__(self, rows, width):
        self.rows, self.out = rows, torch.empty(sum(rows), width)

    def __call__(self, x):
        places = self.out.split(self.rows)
        places[dist.get_rank()].copy_(x)
        works = [dist.broadcast(place, src, async_op=True) for src, place in enumerate(places)]
        for work in works:
            work.wait()
        return self.out


class Scatter:
    """Own rows of the sum over ranks: each part to its rank, which adds."""

    def __init__(self, rows, width):
        mine = rows[dist.get_rank()]
        self.rows, self.got = rows, torch.empty(len(rows) * mine, width)
        self.out = torch.empty(mine, width)

    def __call__(self, x):
        mine = len(self.out)
        dist.all_to_all_single(self.got, x, [mine] * len(self.rows), self.rows)
        return torch.sum(self.got.view(len(self.rows), *self.out.shape), 0, out=self.out)


def all_reduce_into(x):
    dist.all_reduce(x)
    return x


class Floor:
    """Products into memory that is there; `forward`, `after`: on x, on y; `before`: on its
    gradient, `backward`: on that of x.
    """

    def __init__(self, x, weight, gradient, **collectives):
        self.operands = x.detach(), weight.detach(), gradient
        self.collectives = collectives
        total = len(gradient) if "before" not in collectives else len(x)
        self.y = torch.empty(total, weight.shape[0])
        self.of_x, self.of_weight = torch.empty(total, weight.shape[1]), torch.empty_like(weight)

    def _do(self, name, value):
        return self.collectives[name](value) if name in self.collectives else value

    @torch.no_grad()
    def __call__(self):
        x, weight, gradient = self.operands
        rows = self._do("forward", x)
        y = self._do("after", torch.mm(rows, weight.T, out=self.y))
        gradient = self._do("before", gradient)
        of_x = self._do("backward", torch.mm(gradient, weight, out=self.of_x))
        return y, of_x, torch.mm(gradient.T, rows, out=self.of_weight)


def measure(rank, rows, inputs, outputs, repeats):
    """Seconds and bytes of all ways to compute linears, in forward and backward."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    case = Case(rank, rows, inputs, outputs)
    seconds, moved = {}, {}
    for kind, ways in case.ways().items():
        expected = [value.clone() for value in ways[FLOOR]()]
        for way in ways.values():
            for got, want in zip(way(), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        seconds[kind] = in_turns(ways, repeats)
        for name, way in ways.items():
            if name != FLOOR:
                with vc.trace() as calls:
                    way()
                moved[kind, name] = [sum(c.sent for c in calls), sum(c.received for c in calls)]
    bounds = {
        kind: [4 * sum(pair) for pair in zip(*steps, strict=True)]
        for kind, steps in case.bounds().items()
    }
    return seconds, moved, bounds


def in_turns(ways, repeats):
    """Seconds of each way, one call after the other, all ranks together."""
    seconds = {name: [] for name in ways}
    for turn in range(repeats + 1):
        # who goes first may find warmer caches
        for name in list(ways) if turn % 2 else list(ways)[::-1]:
            vc.all_reduce(torch.zeros(1))  # ranks begin together
            begin = time.perf_counter()
            ways[name]()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def infer(rank, rows, inputs, outputs, repeats):
    """The same for the paths of inference, and what a call allocates."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    case = Case(rank, rows, inputs, outputs)
    seconds, allocated = {}, {}
    with torch.inference_mode():
        for kind in (torch.nn.LayerNorm, torch.nn.RMSNorm):
            for path, ways in paths(case, kind).items():
                wanted = [value.clone() for value in ways["one after the other"]()]
                for way in ways.values():
                    same = [torch.equal(a, b) for a, b in zip(way(), wanted, strict=True)]
                    assert all(same), path
                seconds[kind.__name__, path] = in_turns(ways, repeats)
                found = {name: allocations(way) for name, way in ways.items()}
                allocated[kind.__name__, path] = found
    return seconds, allocated


def paths(case, kind):
    """By path: one layer after the other, fused, and fused with memory that is kept."""
    rows, n, k = case.rows, sum(case.outputs), sum(case.inputs)
    before, after = kind(k), kind(n)
    residual, bias, added = torch.randn(rows[case.rank], n), torch.randn(case.n), torch.randn(n)
    x, part, columns, weight, across = (
        case.x.detach(),
        case.part.detach(),
        case.columns.detach(),
        case.weight.detach(),
        case.across.detach(),
    )

    def row():
        y = row_parallel_linear(columns, across, added, sequence_sizes=rows)
        total = residual + y
        return vc.all_gather_v(after(total), rows), total

    def fused_row(buffers):
        return row_linear_norm(
            columns, across, added, residual, after, sequence_sizes=rows, buffers=buffers
        )

    def fused_column(x, sequence, buffers):
        return (
            norm_column_linear(x, before, weight, bias, sequence_sizes=sequence, buffers=buffers),
        )

    def column(x, sequence):
        return (column_parallel_linear(before(x), weight, bias, sequence_sizes=sequence),)

    def three(plain, fused):
        buffers = Buffers()
        return {
            "one after the other": plain,
            "fused": lambda: fused(None),
            "fused, with buffers": lambda: fused(buffers),
        }

    return {
        "norm, column": three(lambda: column(x, None), lambda b: fused_column(x, None, b)),
        "norm, column of a sequence": three(
            lambda: column(part, rows), lambda b: fused_column(part, rows, b)
        ),
        "row, residual, norm, gather": three(row, fused_row),
    }


def allocations(way):
    """Bytes that a call has allocated at its peak, what it returns included, and most at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        results = [way()]  # not freed before the last count
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    results.clear()
    return max(accumulate(sizes, initial=0)), max((0, *sizes))


def slowest(answers, key):
    """Seconds of the slowest rank, turn by turn, of each way."""
    return {
        name: [
            max(turn) for turn in zip(*(answer[0][key][name] for answer in answers), strict=True)
        ]
        for name in answers[0][0][key]
    }


def timing(name, seconds, first):
    """Cells: milliseconds, and how often the first fits, turn by turn."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[first], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [f"{1e3 * median(seconds[name]):.2f}", f"{middle:.2f}", f"{low:.2f} ... {high:.2f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2048, help="of the sequence, T")
    parser.add_argument("--inputs", type=int, default=1024, help="K")
    parser.add_argument("--outputs", type=int, default=1024, help="N")
    parser.add_argument("--repeats", type=int, default=15, help="2 at least")
    options = parser.parse_args()
    print(machine(), end="\n\n")
    parts = [uneven(n, options.ranks) for n in (options.rows, options.inputs, options.outputs)]
    print(
        f"{options.ranks} ranks, fp32: T = {options.rows} rows in parts of {parts[0]}, "
        f"K = {options.inputs} in {parts[1]}, N = {options.outputs} in {parts[2]}"
    )
    print("forward and backward, the slowest rank:", end="\n\n")
    answers = vc.launch(measure, options.ranks, *parts, options.repeats, timeout=1800)
    rows = []
    for kind in answers[0][0]:
        seconds = slowest(answers, kind)
        rows += [[kind, name, *timing(name, seconds, FLOOR)] for name in seconds]
    table(["linear", "way", "ms", f"of {FLOOR}", "quartiles"], rows)

    rows = []
    for kind, name in answers[0][1]:
        moved = [answer[1][kind, name] for answer in answers]
        bound = [answer[2].get(name, answer[2][kind]) for answer in answers]
        ratios = [
            got / least
            for pair in zip(moved, bound, strict=True)
            for got, least in zip(*pair, strict=True)
        ]
        cells = [f"{max(map(max, values)) / 1e6:.3f}" for values in (moved, bound)]
        rows.append([kind, name, *cells, f"{min(ratios):.2f} ... {max(ratios):.2f}"])
    print("bytes sent or received by the busiest rank, and by all ranks in terms of the least:\n")
    table(["linear", "way", "MB", "MB at least", "of that, all ranks"], rows)

    print("inference, the slowest rank, and what the busiest one allocates in a call:\n")
    answers = vc.launch(infer, options.ranks, *parts, options.repeats, timeout=1800)
    rows = []
    for kind, path in answers[0][0]:
        seconds = slowest(answers, (kind, path))
        for name in seconds:
            memory = [answer[1][kind, path][name] for answer in answers]
            cells = [f"{max(column) / 1e6:.2f}" for column in zip(*memory, strict=True)]
            times = timing(name, seconds, "one after the other")
            rows.append([kind, path, name, *times, *cells])
    columns = ["norm", "path", "way", "ms", "of one after the other", "quartiles"]
    table([*columns, "MB at its peak", "MB of the largest"], rows)


if __name__ == "__main__":
    main()
