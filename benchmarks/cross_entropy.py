"""The loss of a sharded vocabulary: ``python benchmarks/cross_entropy.py``.

The script times forward and backward beside a floor and beside gathered logits. The floor is
torch's loss of this rank's columns, which is a wrong number with the least work. A second table has
the loss from hidden states. Memory is the peak of a new process beyond inputs and gradients. Times
are of the slowest rank, medians of runs in turns.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from measuring import Measured, arguments, median, ms, ratio, slowest, table, turns_of

import varcomm as vc
from varcomm import tensor_parallel as tp

FLOOR, SHARDED, GATHERED = "torch, own columns", "vocab_parallel", "gather, then torch"
AT_ONCE, CHUNKED = "linear, vocab_parallel", "linear_cross_entropy"


def works(rank, ranks, tokens, vocabulary, hidden, dtype):
    """Return two functions per method: one makes the inputs, one computes the loss."""
    sizes = vc.ShardSizes.balanced(vocabulary, ranks)
    target = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    own = (target - sizes.offsets[rank]).clamp(0, sizes[rank] - 1)

    def logits():
        torch.manual_seed(2 + rank)
        return [torch.randn(tokens, sizes[rank], dtype=dtype, requires_grad=True)]

    def states():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(tokens, hidden, dtype=dtype, generator=generator)
        torch.manual_seed(2 + rank)  # the same head each time, with numbers other than x
        head = torch.randn(sizes[rank], hidden, dtype=dtype) / hidden**0.5
        return [x.requires_grad_(), head.requires_grad_()]

    def sharded(z):
        return tp.vocab_parallel_cross_entropy(z, target, sizes, reduction="mean")

    def gathered(z):
        return F.cross_entropy(tp.gather_from_tensor_model_parallel_region(z, sizes), target)

    def at_once(x, head):
        return sharded(F.linear(tp.copy_to_tensor_model_parallel_region(x), head))

    def chunked(x, head):
        return tp.linear_cross_entropy(x, head, target, sizes, reduction="mean")

    return {
        FLOOR: (logits, lambda z: F.cross_entropy(z, own)),
        SHARDED: (logits, sharded),
        GATHERED: (logits, gathered),
        AT_ONCE: (states, at_once),
        CHUNKED: (states, chunked),
    }


def run(inputs, loss):
    """Return the cost and the collectives of forward and backward, and the loss."""
    for x in inputs:
        x.grad = None
    vc.all_reduce(torch.zeros(1))  # ranks begin together
    with Measured() as forward, vc.trace() as calls:
        value = loss(*inputs)
    with Measured() as backward, vc.trace() as more:
        value.backward()
    return forward, backward, f"{len(calls)} + {len(more)}", value.item()


def memory(rank, name, what):
    """Return the peak memory of a new process beyond inputs and gradients, in bytes."""
    torch.set_num_threads(1)
    make, loss = works(rank, what[0], 2, 2 * what[0], 2, what[-1])[name]
    run(make(), loss)  # torch's set-up at the first call
    make, loss = works(rank, *what)[name]
    inputs = make()
    with Measured() as cost:
        loss(*inputs).backward()
    return cost.rise - sum(x.grad.nbytes for x in inputs)


def times(rank, names, what, repeats):
    """Return the costs of methods that run in turns."""
    torch.set_num_threads(1)
    chosen = {name: works(rank, *what)[name] for name in names}
    inputs = {name: make() for name, (make, _) in chosen.items()}
    costs = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in turns_of(names, turn):
            cost = run(inputs[name], chosen[name][1])
            if turn:  # the first is to warm up
                costs[name].append(cost)
    return costs


def compare(title, names, what, repeats):
    """Print a table of methods, relative to the first, and return their losses."""
    ranks, tokens, dtype = what[0], what[1], what[-1]
    parts = vc.launch(times, ranks, names, what, repeats, timeout=1800)
    peaks = {n: max(vc.launch(memory, ranks, n, what, timeout=600)) for n in names}
    seconds = {
        name: [slowest([[c[k].wall for c in part[name]] for part in parts]) for k in (0, 1)]
        for name in names
    }
    both = {n: [a + b for a, b in zip(*pair, strict=True)] for n, pair in seconds.items()}
    fewest, rows = 3 * max(4, dtype.itemsize) * tokens * (ranks - 1), []
    for name in names:
        first, second, collectives, _ = parts[0][name][0]
        sent = first.sent + second.sent
        rows.append(
            [
                *(name, *ms(*map(median, seconds[name]))),
                f"{ratio(both[name], both[names[0]]):.2f}",
                *(f"{peaks[name] / 1e6:.1f}", f"{peaks[name] / max(1, peaks[names[0]]):.3f}"),
                *(collectives, f"{sent / 1e3:,.1f}", f"{sent / fewest:.2f}" if fewest else "-"),
            ]
        )
    print(title)
    columns = ["", "ms forward", "ms backward", "ratio", "extra MB", "ratio", "collectives"]
    table([*columns, "kB sent", "of 3 numbers per token"], rows)
    return {name: parts[0][name][0][-1] for name in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
    options = arguments(parser, ranks=2, tokens=4096, vocabulary=32_003, hidden=256, repeats=7)
    dtype = getattr(torch, options.dtype)
    what = (options.ranks, options.tokens, options.vocabulary, options.hidden, dtype)
    columns = vc.ShardSizes.balanced(options.vocabulary, options.ranks)
    losses = compare(
        f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,} on {options.ranks} ranks "
        f"{list(columns)}, {options.dtype}: logits of "
        f"{options.tokens * columns[0] * dtype.itemsize / 1e6:.1f} MB per rank, and their gradient",
        *([FLOOR, SHARDED, GATHERED], what, options.repeats),
    )
    title = f"from hidden states of width {options.hidden}"
    linear = compare(title, [AT_ONCE, CHUNKED], what, options.repeats)
    print(
        f"losses differ by {abs(losses[SHARDED] - losses[GATHERED]):.1e} from the gathered logits' "
        f"and by {abs(linear[CHUNKED] - linear[AT_ONCE]):.1e} from that of logits made at once"
    )


if __name__ == "__main__":
    main()
