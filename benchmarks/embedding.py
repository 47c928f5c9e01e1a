"""Bytes and times of embeddings with a sharded vocabulary: ``python benchmarks/embedding.py``.

Each way to look up tokens runs forward and backward, and all take turns, since machines are noisy.
A rank has one thread.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time

import torch
from measuring import machine, median, table

import varcomm as vc
from varcomm.tensor_parallel.embedding import vocab_parallel_embedding


def drawn(kind, tokens, vocabulary):
    """Ids; those of text are frequent as 1 / (id + 2.7), tokenizers number them so."""
    generator = torch.Generator().manual_seed(0)
    if kind == "distinct":
        several = max(vocabulary, tokens)
        return torch.randperm(several, generator=generator)[:tokens] % vocabulary
    if kind == "uniform":
        return torch.randint(vocabulary, (tokens,), generator=generator)
    frequency = 1 / (torch.arange(vocabulary, dtype=torch.float64) + 2.7)
    return torch.multinomial(frequency, tokens, replacement=True, generator=generator)


def measure(rank, ranks, kind, tokens, vocabulary, width, repeats):
    """Seconds of each way's forward and backward, and bytes of its forward."""
    torch.set_num_threads(1)
    ids = drawn(kind, tokens, vocabulary)
    sizes = vc.ShardSizes.balanced(vocabulary, ranks)
    parts = vc.ShardSizes.balanced(tokens, ranks)
    own = ids.split(list(parts))[rank]
    rows = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(1))
    weight = rows[sizes.range(rank).start : sizes.range(rank).stop].clone().requires_grad_()
    whole = rows.requires_grad_()
    part = slice(parts.range(rank).start, parts.range(rank).stop)

    def lookup(given, *options):
        return lambda: vocab_parallel_embedding(given, weight, sizes, None, *options)

    ways = {
        "part, masked": lookup(ids, parts, "masked"),
        "part, indexed": lookup(ids, parts, "indexed"),
        "part, indexed, own ids": lookup(own, None, "indexed", True),
        "all, masked": lookup(ids, None, "masked"),
        "all, indexed": lookup(ids, None, "indexed"),
        "part, whole table, no ranks": lambda: torch.nn.functional.embedding(own, whole),
    }
    want = whole.detach()[ids]
    costs = {name: [] for name in ways}
    for turn in range(repeats + 1):
        # who goes first may find warmer caches
        for name in list(ways) if turn % 2 else list(ways)[::-1]:
            vc.all_reduce(torch.zeros(1))  # ranks begin together
            weight.grad = whole.grad = None
            begin = time.perf_counter()
            result = ways[name]()
            middle = time.perf_counter()
            result.backward(want[part] if name.startswith("part") else want)
            end = time.perf_counter()
            if turn:  # the first one warms up
                costs[name].append((middle - begin, end - middle))
            expected = want[part] if name.startswith("part") else want
            assert torch.equal(result, expected), name
    return costs, bytes_of(ways)


def bytes_of(ways):
    """What this rank sends and receives in a forward of each way."""
    found = {}
    for name, way in ways.items():
        with vc.trace() as calls, torch.no_grad():
            way()
        found[name] = sum(c.sent for c in calls), sum(c.received for c in calls)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32_003)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    for ranks in options.ranks:
        for kind in ("distinct", "uniform", "text"):
            report(ranks, kind, options)


def report(ranks, kind, options):
    tokens, vocabulary, width = options.tokens, options.vocabulary, options.width
    what = (ranks, kind, tokens, vocabulary, width, options.repeats)
    answers = vc.launch(measure, ranks, *what, timeout=1800)
    distinct = len(drawn(kind, tokens, vocabulary).unique())
    # each token's row, but those that a rank has: where the result is a part, or all of it
    bounds = {"part": (1 - 1 / ranks) * tokens / ranks, "all": (1 - 1 / ranks) * tokens}

    def seconds(name, step):
        """The slowest rank's, turn by turn."""
        turns = zip(*([cost[step] for cost in costs[name]] for costs, _ in answers), strict=True)
        return [max(turn) for turn in turns]

    rows = []
    for name in answers[0][1]:
        where = name.split(",")[0]
        bound = bounds[where] * width * 4
        received = sum(moved[name][1] for _, moved in answers) / ranks
        busiest = max(max(moved[name]) for _, moved in answers)
        forward, backward = seconds(name, 0), seconds(name, 1)
        both = [a + b for a, b in zip(forward, backward, strict=True)]
        masked = [
            a + b for a, b in zip(*(seconds(f"{where}, masked", k) for k in (0, 1)), strict=True)
        ]
        rows.append(
            [
                name,
                f"{received / 1e6:.2f}",
                f"{received / bound:.2f}",
                f"{busiest / 1e6:.2f}",
                f"{1e3 * median(forward):.1f}",
                f"{1e3 * median(backward):.1f}",
                f"{median([a / b for a, b in zip(masked, both, strict=True)]):.2f}",
            ]
        )
    print(
        f"{tokens:,} tokens ({kind} ids, {distinct:,} distinct) of {vocabulary:,}, width {width}, "
        f"fp32, {ranks} ranks; the bound is (1 - 1/P) T/P rows of all tokens for a part, "
        f"{bounds['part'] * width * 4 / 1e6:.2f} MB, and (1 - 1/P) T for all, "
        f"{bounds['all'] * width * 4 / 1e6:.2f} MB"
    )
    table(
        [
            "result, method",
            "MB received a rank",
            "of the bound",
            "MB of the busiest",
            "forward ms",
            "backward ms",
            "masked / this, turn by turn",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
