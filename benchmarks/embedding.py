"""Bytes and times of embeddings with a sharded vocabulary: ``python benchmarks/embedding.py``.

Each method to look up tokens runs forward and backward, in turns, with one thread per rank. *Sums*
is ``exchange="sum"``, the default on GPUs; *rows* is ``exchange="rows"``, the default on CPUs.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time

import torch
from measuring import arguments, median, ms, ratio, slowest, table, turns_of

import varcomm as vc
from varcomm.tensor_parallel import vocab_parallel_embedding


def drawn(kind, tokens, vocabulary):
    """Return ids; ids of text have the frequency 1 / (id + 2.7), as tokenizers assign them."""
    generator = torch.Generator().manual_seed(0)
    if kind == "distinct":
        several = max(vocabulary, tokens)
        return torch.randperm(several, generator=generator)[:tokens] % vocabulary
    if kind == "uniform":
        return torch.randint(vocabulary, (tokens,), generator=generator)
    frequency = 1 / (torch.arange(vocabulary, dtype=torch.float64) + 2.7)
    return torch.multinomial(frequency, tokens, replacement=True, generator=generator)


def measure(rank, ranks, kind, tokens, vocabulary, width, repeats):
    """Return seconds of forward and backward, and bytes of forward, for each method."""
    torch.set_num_threads(1)
    ids = drawn(kind, tokens, vocabulary)
    sizes = vc.ShardSizes.balanced(vocabulary, ranks)
    parts = vc.ShardSizes.balanced(tokens, ranks)
    own = ids.split(list(parts))[rank]
    full = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(1))
    weight = full[sizes.range(rank).start : sizes.range(rank).stop].clone().requires_grad_()
    full.requires_grad_()
    want = full.detach()[ids]
    part = want[parts.range(rank).start : parts.range(rank).stop]

    def lookup(given, to_parts, exchange):
        how = {"sequence_sizes": to_parts, "exchange": exchange}
        return lambda: vocab_parallel_embedding(given, weight, sizes, **how)

    ways = {
        "part, sums": lookup(ids, parts, "sum"),
        "part, rows": lookup(ids, parts, "rows"),
        "part, rows, own ids": lambda: lookup(vc.all_gather_v(own, parts), parts, "rows")(),
        "all, sums": lookup(ids, None, "sum"),
        "all, rows": lookup(ids, None, "rows"),
        "part, full table, no ranks": lambda: torch.nn.functional.embedding(own, full),
    }
    costs, moved = {name: [] for name in ways}, {}
    for turn in range(repeats + 1):
        for name in turns_of(ways, turn):
            vc.all_reduce(torch.zeros(1))  # ranks begin together
            weight.grad = full.grad = None
            expected = part if name.startswith("part") else want
            begin = time.perf_counter()
            with vc.trace() as calls:
                result = ways[name]()
            middle = time.perf_counter()
            result.backward(expected)
            if turn:  # the first one warms up
                costs[name].append((middle - begin, time.perf_counter() - middle))
            moved[name] = calls.total.sent, calls.total.received
            assert torch.equal(result, expected), name
    return costs, moved


def report(ranks, kind, tokens, vocabulary, width, repeats):
    what = (ranks, kind, tokens, vocabulary, width, repeats)
    answers = vc.launch(measure, ranks, *what, timeout=1800)
    distinct = len(drawn(kind, tokens, vocabulary).unique())
    # rows of tokens that a rank does not own, if the result is a part, or the full tensor
    bounds = {"part": (1 - 1 / ranks) * tokens / ranks, "all": (1 - 1 / ranks) * tokens}
    bounds = {name: rows * width * 4 for name, rows in bounds.items()}
    seconds = {
        name: [slowest([[c[k] for c in costs[name]] for costs, _ in answers]) for k in (0, 1)]
        for name in answers[0][0]
    }
    both = {n: [a + b for a, b in zip(*pair, strict=True)] for n, pair in seconds.items()}
    rows = []
    for name in seconds:
        kept = name.split(",")[0]
        received = sum(moved[name][1] for _, moved in answers) / ranks
        busiest = max(max(moved[name]) for _, moved in answers)
        times = ms(*map(median, seconds[name]))
        faster = f"{ratio(both[f'{kept}, sums'], both[name]):.2f}"
        share = f"{received / bounds[kept]:.2f}"
        rows.append([name, f"{received / 1e6:.2f}", share, f"{busiest / 1e6:.2f}", *times, faster])
    print(
        f"{tokens:,} tokens ({kind} ids, {distinct:,} distinct) of {vocabulary:,}, width {width}, "
        f"fp32, {ranks} ranks; the bound is (1 - 1/P) T/P rows of all tokens for a part, "
        f"{bounds['part'] / 1e6:.2f} MB, and (1 - 1/P) T for all, {bounds['all'] / 1e6:.2f} MB"
    )
    columns = ["result, method", "MB received per rank", "of the bound", "MB of the busiest"]
    table([*columns, "forward ms", "backward ms", "sums / this, turn by turn"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = arguments(parser, ranks=[2, 4], tokens=8192, vocabulary=32_003, width=512, repeats=7)
    for ranks in given.ranks:
        for kind in ("distinct", "uniform", "text"):
            report(ranks, kind, given.tokens, given.vocabulary, given.width, given.repeats)


if __name__ == "__main__":
    main()
