"""Parallel linears beside their products and collectives: ``python benchmarks/linears.py``.

The script times forward and backward of each linear beside a floor and beside varcomm's operators
without overlap. The floor is the dense products of the local block and bare calls of
torch.distributed into existing memory, in sequence. All methods of a table take turns, with one
thread per rank. The threads of an engine need a core too.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from measuring import arguments, median, ms, spread, table
from torch.nn.functional import linear

import varcomm as vc
from varcomm import tensor_parallel as tp
from varcomm.cli.bench import in_turns
from varcomm.cli.workload import shard_sizes

FLOOR = "products, then collectives"
AGAIN = "column_parallel_linear, gathers again"


class Case:
    """Tensors of one rank: T rows of a sequence, K inputs and N outputs, in uneven parts."""

    def __init__(self, rank, rows, inputs, outputs):
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.rank, self.rows, self.inputs, self.outputs = rank, rows, inputs, outputs
        t, k, n = sum(rows), sum(inputs), sum(outputs)

        def made(*shape, scale=1.0):
            return (torch.randn(*shape) * scale).requires_grad_()

        self.x, self.part = made(t, k), made(rows[rank], k)
        self.columns = made(t, inputs[rank])
        self.weight = made(outputs[rank], k, scale=k**-0.5)
        self.across = made(n, inputs[rank], scale=k**-0.5)

    def ways(self):
        """Return the methods of each kind: functions that run forward and backward."""
        rows, t, n = self.rows, sum(self.rows), sum(self.outputs)
        column, row = (self.x, self.weight), (self.columns, self.across)
        sequence = (self.part, self.weight)
        y_column, y_row = torch.randn(t, self.outputs[self.rank]), torch.randn(t, n)
        y_part = torch.randn(rows[self.rank], n)

        def both(fn, operands, gradient, **options):
            def way():
                y = fn(*operands, **options)
                return y.detach(), *torch.autograd.grad(y, operands, gradient)

            return way

        def copied(x, w):
            return linear(tp.copy_to_tensor_model_parallel_region(x), w)

        def reduced(x, w):
            return tp.reduce_from_tensor_model_parallel_region(linear(x, w))

        k, column_linear, row_linear = (
            len(self.x[0]),
            tp.column_parallel_linear,
            (tp.row_parallel_linear),
        )
        return {
            "column": {
                FLOOR: floor(*column, y_column, backward=all_reduce_into),
                "of operators": both(copied, column, y_column),
                "column_parallel_linear": both(column_linear, column, y_column),
            },
            "column of a sequence": {
                FLOOR: floor(
                    *(*sequence, y_column), forward=gather(rows, k), backward=scatter(rows, k)
                ),
                "of operators": both(
                    lambda x, w: linear(vc.all_gather_v(x, rows), w), sequence, y_column
                ),
                "column_parallel_linear, keeps": both(
                    column_linear, sequence, y_column, sequence_sizes=rows, save="gathered"
                ),
                AGAIN: both(column_linear, sequence, y_column, sequence_sizes=rows),
            },
            "row": {
                FLOOR: floor(*row, y_row, after=all_reduce_into),
                "of operators": both(reduced, row, y_row),
                "row_parallel_linear": both(row_linear, row, y_row),
            },
            "row to a sequence": {
                FLOOR: floor(*(*row, y_part), after=scatter(rows, n), before=gather(rows, n)),
                "of operators": both(
                    lambda x, w: vc.reduce_scatter_v(linear(x, w), rows), row, y_part
                ),
                "row_parallel_linear": both(row_linear, row, y_part, sequence_sizes=rows),
            },
        }

    def bounds(self):
        """Return the fewest bytes that a rank sends and receives, by kind."""
        t, mine, peers = sum(self.rows), self.rows[self.rank], len(self.rows) - 1
        k, n, pieces = sum(self.inputs), sum(self.outputs), 2 * t * peers / (peers + 1)
        gathers = torch.tensor([mine * peers, t - mine], dtype=torch.float64)
        gathers_and_scatters = gathers + gathers.flip(0)
        fewest = {
            "column": torch.tensor([pieces, pieces]) * k,
            "column of a sequence": gathers_and_scatters * k,
            AGAIN: (gathers_and_scatters + gathers) * k,
            "row": torch.tensor([pieces, pieces]) * n,
            "row to a sequence": gathers_and_scatters * n,
        }
        return {kind: (4 * rows).tolist() for kind, rows in fewest.items()}


def gather(rows, width):
    """Gather uneven rows with simultaneous broadcasts into their places."""
    out = torch.empty(sum(rows), width)
    places = out.split(rows)

    def run(x):
        places[dist.get_rank()].copy_(x)
        works = [dist.broadcast(place, src, async_op=True) for src, place in enumerate(places)]
        for work in works:
            work.wait()
        return out

    return run


def scatter(rows, width):
    """Send each part to its rank, which sums."""
    mine = rows[dist.get_rank()]
    got, out = torch.empty(len(rows) * mine, width), torch.empty(mine, width)

    def run(x):
        dist.all_to_all_single(got, x, [mine] * len(rows), rows)
        return torch.sum(got.view(len(rows), *out.shape), 0, out=out)

    return run


def all_reduce_into(x):
    dist.all_reduce(x)
    return x


def floor(x, weight, gradient, **collectives):
    """Compute products into existing memory, with collectives.

    `forward` acts on x, `after` on y, `before` on the gradient of y, `backward` on the gradient of
    x.
    """
    x, weight = x.detach(), weight.detach()
    total = len(gradient) if "before" not in collectives else len(x)
    y = torch.empty(total, weight.shape[0])
    of_x, of_weight = torch.empty(total, weight.shape[1]), torch.empty_like(weight)

    def do(name, value):
        return collectives[name](value) if name in collectives else value

    @torch.no_grad()
    def run():
        rows = do("forward", x)
        result = do("after", torch.mm(rows, weight.T, out=y))
        incoming = do("before", gradient)
        back = do("backward", torch.mm(incoming, weight, out=of_x))
        return result, back, torch.mm(incoming.T, rows, out=of_weight)

    return run


def measure(rank, sizes, repeats):
    """Return seconds and bytes of all methods, in forward and backward."""
    case, seconds, moved = Case(rank, *sizes), {}, {}
    for kind, ways in case.ways().items():
        expected = [value.clone() for value in ways[FLOOR]()]
        for name, way in ways.items():
            with vc.trace() as calls:
                found = way()
            for got, want in zip(found, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
            moved[kind, name] = [calls.total.sent, calls.total.received]
        seconds[kind] = in_turns(ways, repetitions=repeats)
    return seconds, moved, case.bounds()


def timings(seconds, first):
    """Return the cells of each method: milliseconds, and the ratio to the first method."""
    for name, taken in seconds.items():
        yield name, *ms(median(taken), digits=2), spread(taken, seconds[first])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = arguments(parser, ranks=2, rows=2048, inputs=1024, outputs=1024, repeats=15)
    # every second part has two thirds of the size
    parts = [shard_sizes("3:2", n, given.ranks) for n in (given.rows, given.inputs, given.outputs)]
    print(
        f"{given.ranks} ranks, fp32: T = {given.rows} rows in parts of {parts[0]}, "
        f"K = {given.inputs} in {parts[1]}, N = {given.outputs} in {parts[2]}"
    )
    print("forward and backward, the slowest rank:", end="\n\n")
    answers = vc.launch(measure, given.ranks, parts, given.repeats, timeout=1800)
    seconds, rows = answers[0][0], []
    for kind in seconds:
        rows += [[kind, *cells] for cells in timings(seconds[kind], FLOOR)]
    table(["linear", "way", "ms", f"of {FLOOR} (quartiles)"], rows)

    rows = []
    for kind, name in answers[0][1]:
        if name != FLOOR:
            moved = [answer[1][kind, name] for answer in answers]
            bound = [answer[2].get(name, answer[2][kind]) for answer in answers]
            pairs = [zip(*both, strict=True) for both in zip(moved, bound, strict=True)]
            ratios = [got / least for pair in pairs for got, least in pair]
            cells = [f"{max(map(max, values)) / 1e6:.3f}" for values in (moved, bound)]
            rows.append([kind, name, *cells, f"{min(ratios):.2f} ... {max(ratios):.2f}"])
    print("bytes sent or received by the busiest rank, and those of all ranks over the fewest:\n")
    table(["linear", "way", "MB", "MB at least", "ratio, all ranks"], rows)


if __name__ == "__main__":
    main()
