"""The loss of a sharded vocabulary: ``python benchmarks/cross_entropy.py``.

Forward and backward, beside the floor, which is torch's loss on this rank's own columns alone, a
wrong number that costs what any right one must; and beside gathering the logits. Then the loss
from hidden states, beside making the logits first. Memory is what the process needed at its peak
beyond the inputs and their gradients, in ranks started anew; times are medians of runs that take
turns, of the slowest rank.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from measuring import Measured, machine, median, table

import varcomm as vc
from varcomm.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from varcomm.tensor_parallel.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)

FLOOR, SHARDED, GATHERED = "torch, own columns", "vocab_parallel", "gather, then torch"
AT_ONCE, CHUNKED = "linear, vocab_parallel", "linear_cross_entropy"


def works(rank, ranks, tokens, vocabulary, hidden, dtype):
    """Each method as what it computes from, and how."""
    sizes = vc.ShardSizes.balanced(vocabulary, ranks)
    torch.manual_seed(0)
    target = torch.randint(vocabulary, (tokens,))
    own = (target - sizes.offsets[rank]).clamp(0, sizes[rank] - 1)
    torch.manual_seed(1 + rank)

    def logits():
        return [torch.randn(tokens, sizes[rank], dtype=dtype, requires_grad=True)]

    def states():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(tokens, hidden, dtype=dtype, generator=generator)
        head = torch.randn(sizes[rank], hidden, dtype=dtype) / hidden**0.5
        return [x.requires_grad_(), head.requires_grad_()]

    def gathered(z):
        return F.cross_entropy(gather_from_tensor_model_parallel_region(z, sizes), target)

    def at_once(x, head):
        z = F.linear(copy_to_tensor_model_parallel_region(x), head)
        return vocab_parallel_cross_entropy(z, target, sizes, reduction="mean")

    return {
        FLOOR: (logits, lambda z: F.cross_entropy(z, own)),
        SHARDED: (
            logits,
            lambda z: vocab_parallel_cross_entropy(z, target, sizes, reduction="mean"),
        ),
        GATHERED: (logits, gathered),
        AT_ONCE: (states, at_once),
        CHUNKED: (
            states,
            lambda x, head: linear_cross_entropy(x, head, target, sizes, reduction="mean"),
        ),
    }


def run(inputs, loss):
    """Forward and backward; what each cost, and the loss."""
    for x in inputs:
        x.grad = None
    vc.all_reduce(torch.zeros(1))  # ranks begin together
    with Measured() as forward, vc.trace() as calls:
        value = loss(*inputs)
    with Measured() as backward, vc.trace() as more:
        value.backward()
    return forward, backward, len(calls), len(more), value.item()


def memory(rank, name, what):
    """Bytes at the peak, beyond inputs and gradients, of a process that has done nothing else."""
    torch.set_num_threads(1)
    small = works(rank, what[0], 2, 2 * what[0], 2, what[-1])
    make, loss = small[name]
    run(make(), loss)  # what torch sets up at its first call
    make, loss = works(rank, *what)[name]
    inputs = make()
    with Measured() as cost:
        loss(*inputs).backward()
    return cost.rise - sum(x.grad.nbytes for x in inputs), inputs[0].nbytes


def times(rank, names, what, repeats):
    """Costs of methods that take turns."""
    torch.set_num_threads(1)
    all_works = works(rank, *what)
    inputs = {make: make() for make, _ in (all_works[name] for name in names)}
    costs = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in names if turn % 2 else names[::-1]:
            make, loss = all_works[name]
            cost = run(inputs[make], loss)
            if turn:  # the first is to warm up
                costs[name].append(cost)
    return costs


def compare(title, names, what, repeats):
    """Print a table of methods, the first of which is the measure of the others."""
    ranks, tokens, dtype = what[0], what[1], what[-1]
    parts = vc.launch(times, ranks, names, what, repeats, timeout=1800)
    peaks = {}
    for name in names:
        peaks[name] = max(part[0] for part in vc.launch(memory, ranks, name, what, timeout=600))

    def seconds(name):
        """Forward, backward and both, of the slowest rank, turn by turn."""
        turns = list(zip(*(part[name] for part in parts), strict=True))
        forward = [max(cost[0].wall for cost in turn) for turn in turns]
        backward = [max(cost[1].wall for cost in turn) for turn in turns]
        return forward, backward, [a + b for a, b in zip(forward, backward, strict=True)]

    rows = []
    told = 3 * max(4, dtype.itemsize) * tokens * (ranks - 1)
    for name in names:
        forward, backward, both = seconds(name)
        ratio = median([a / b for a, b in zip(both, seconds(names[0])[2], strict=True)])
        first, second, calls, more, _ = parts[0][name][0]
        rows.append(
            [
                name,
                f"{1e3 * median(forward):.1f}",
                f"{1e3 * median(backward):.1f}",
                f"{ratio:.2f}",
                f"{peaks[name] / 1e6:.1f}",
                f"{peaks[name] / max(1, peaks[names[0]]):.3f}",
                f"{calls} + {more}",
                f"{(first.sent + second.sent) / 1e3:,.1f}",
                f"{(first.sent + second.sent) / told:.2f}" if told else "-",
            ]
        )
    print(title)
    columns = ["", "ms forward", "ms backward", "ratio", "extra MB", "ratio", "collectives"]
    table([*columns, "kB sent", "of 3 numbers a token"], rows)
    return {name: parts[0][name][0][-1] for name in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32_003)
    parser.add_argument("--hidden", type=int, default=256, help="width of hidden states")
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    what = (options.ranks, options.tokens, options.vocabulary, options.hidden, dtype)
    print(machine(), end="\n\n")
    columns = vc.ShardSizes.balanced(options.vocabulary, options.ranks)
    size = options.tokens * columns[0] * dtype.itemsize / 1e6
    losses = compare(
        f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,} on {options.ranks} ranks "
        f"{list(columns)}, {options.dtype}: logits of {size:.1f} MB a rank, as much for their "
        "gradient",
        [FLOOR, SHARDED, GATHERED],
        what,
        options.repeats,
    )
    linear = compare(
        f"from hidden states of width {options.hidden}",
        [AT_ONCE, CHUNKED],
        what,
        options.repeats,
    )
    print(
        f"losses differ by {abs(losses[SHARDED] - losses[GATHERED]):.1e} from the gathered logits' "
        f"and by {abs(linear[CHUNKED] - linear[AT_ONCE]):.1e} from that of logits made at once"
    )


if __name__ == "__main__":
    main()
