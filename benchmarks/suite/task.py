"""Contenders of a case: checked once, then timed in turns."""

import statistics
from collections import namedtuple
from dataclasses import replace
from functools import cached_property, partial
from zlib import crc32

import torch
import torch.distributed as dist

import varcomm as vc
from varcomm.cli.bench import in_turns, summary
from varcomm.cli.workload import ROOT, Workload, workload
from varcomm.ops.reduction import sum_in_rank_order

OURS, FLOOR, PEER, COPY = "varcomm", "floor", "peer", "copy"


# A method for a case; all ranks call `run` repeatedly.
Contender = namedtuple("Contender", "name kind run")

# A case on one rank. `expected` is the result on this rank, `tolerance` is relative to its largest
# value, `fewest` are the fewest bytes that this rank can send and receive, `cannot` has the
# contenders that cannot run, with the reason.
Task = namedtuple("Task", "contenders expected tolerance nbytes skew fewest cannot")


class Layout(Workload):
    """A workload; every rank can compute the rows of all ranks."""

    @classmethod
    def of(cls, case, rank, device):
        """Lay out a case of `varcomm bench`, or a plan of random rows: half of those of a rank."""
        operation = {"halo_with_own": "halo", "random": "indexed_all_to_all_v"}
        name = operation.get(case.operation, case.operation)
        layout = cls(**vars(workload(replace(case, operation=name), rank, device)))
        if case.operation == "random":
            layout = replace(layout, sizes=[2 * size for size in layout.sizes])
        return layout

    world = property(lambda self: len(self.sizes))
    mine = property(lambda self: self.sizes[self.rank])
    total = property(lambda self: sum(self.sizes))

    @property
    def skew(self):
        return max(self.sizes) * self.world / max(self.total, 1)

    @cached_property
    def send(self):
        return super().send

    @cached_property
    def recv(self):
        return super().recv

    @cached_property
    def index(self):
        """Return the rows that this rank sends, rank by rank."""
        return torch.cat(self.indices(self.rank))

    @cached_property
    def home(self):
        """Return the own row of each row that the adjoint returns."""
        return self.transposed().index

    def transposed(self):
        """Return the layout of the adjoint."""
        return replace(self, matrix=[list(column) for column in zip(*self.matrix, strict=True)])

    def values(self, rank, rows, what):
        seed = crc32(f"{what} {rank}".encode())
        drawn = torch.randn(rows, self.width, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.dtype)


def reference(primitive, layout, what):
    """Return this rank's input, and its result from the inputs of all ranks, without messages.

    A primitive is one direction of an operation: the backward of "all_gather" is "reduce_scatter",
    and that of "pick_rows", an indexed exchange, is "sum_rows".
    """
    rank, sizes = layout.rank, layout.sizes

    def made(other):
        rows = sizes[other]
        if primitive == "reduce_scatter" or (primitive == "scatter" and other == ROOT):
            rows = layout.total
        elif primitive in ("all_to_all", "sum_rows"):
            rows = sum(layout.matrix[other])
        elif primitive == "scatter":
            rows = 0
        return layout.values(other, rows, what)

    inputs = [made(other) for other in range(layout.world)]
    if primitive == "all_gather":
        result = torch.cat(inputs)
    elif primitive == "gather":
        result = torch.cat(inputs) if rank == ROOT else inputs[rank][:0]
    elif primitive == "scatter":
        result = inputs[ROOT].split(sizes)[rank].clone()
    elif primitive == "pick_rows":
        result = torch.cat([x[layout.indices(other)[rank]] for other, x in enumerate(inputs)])
    else:
        blocks = [x.split(layout.matrix[i])[rank].clone() for i, x in enumerate(inputs)]
        if primitive == "all_to_all":
            result = torch.cat(blocks)
        elif primitive == "reduce_scatter":
            result = sum_in_rank_order(blocks, True)
        else:
            zeros = torch.zeros(layout.mine, layout.width, dtype=torch.float64)
            total = zeros.to(layout.device).index_add_(0, layout.home, torch.cat(blocks).double())
            result = total.to(layout.dtype)
    return inputs[rank], result


def contender(name, kind, function, inputs, gradient):
    """Return a call of an autograd function, or of its backward.

    Inputs require a gradient, as in training. The first call builds the graph of a backward; it is
    not timed. Each contender has its own tensors, because some write into their input.
    """
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = [x.clone().requires_grad_() for x in given]
    if gradient is None:
        return Contender(name, kind, partial(function, *leaves))
    of_result, graph = gradient.clone(), []

    def backward():
        if not graph:
            graph.append(function(*leaves))
        found = torch.autograd.grad(graph, leaves, of_result, retain_graph=True)
        return found if isinstance(inputs, tuple) else found[0]

    return Contender(name, kind, backward)


def tolerance(case):
    """Return the allowed error of a sum relative to the largest value."""
    eps = torch.finfo(getattr(torch, case.dtype)).eps
    # fp16 and bf16 are rounded a few times; sums of other dtypes are long and differ in order
    return min(0.02, 4 * eps) if eps > 1e-4 else 84 * eps


def measure(rank, case, seconds, repetitions, peers, build):
    """Check the result of each contender, and time the right ones; collective."""
    torch.set_num_threads(1)
    device = vc.init().device
    task = build(case, peers, device)
    right, cannot = checked(task, case)
    with vc.trace() as trace:
        right[0].run()
    moved = torch.ones(max(task.fewest), dtype=torch.uint8, device=device)
    right.append(Contender("copy", COPY, moved.clone))
    runs = {each.name: each.run for each in right}
    samples = in_turns(runs, seconds, repetitions, device)
    sent = trace.total.sent
    line = summary(case, task.nbytes, task.skew, task.fewest, sent, samples[OURS])
    timings = {each.name: timing(each.kind, samples[each.name], samples[OURS]) for each in right}
    return {**line, "timings": timings, "cannot": cannot}


def timing(kind, samples, ours):
    """Return median and quartiles of seconds, and the ratio of varcomm's time to this one.

    The ratio is the median over repetitions, in which both ran close to each other.
    """
    ratio = statistics.median(a / b for a, b in zip(ours, samples, strict=True))
    many = samples * (3 if len(samples) == 1 else 1)
    low, median, high = statistics.quantiles(many, n=4, method="inclusive")
    return {"kind": kind, "seconds": median, "low": low, "high": high, "ratio": ratio}


def checked(task, case):
    """Return the contenders that are right on all ranks, and the faults of the others."""
    right, cannot = [], dict(task.cannot)
    for each in task.contenders:
        try:
            wrong = difference(each.run(), task)
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        wrongs = [""] * dist.get_world_size()
        dist.all_gather_object(wrongs, wrong)
        wrong = next(filter(None, wrongs), "")  # the fault of the first rank that has one
        if not wrong:
            right.append(each)
        elif each.kind == OURS:
            raise RuntimeError(f"{case}: varcomm is wrong, which is a bug: {wrong}")
        else:
            cannot[each.name] = wrong
    return right, cannot


def difference(result, task):
    """Return the difference of a result from the expected one, or an empty string."""
    results = result if isinstance(result, tuple) else (result,)
    expected = task.expected if isinstance(task.expected, tuple) else (task.expected,)
    for got, want in zip(results, expected, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            of_got, of_want = (f"{tuple(x.shape)} of {x.dtype}" for x in (got, want))
            return f"wrong result: shape {of_got} in place of {of_want}"
        if want.numel():
            error = float((got.detach().double() - want.double()).abs().max())
            if not error <= task.tolerance * float(want.double().abs().max()):
                return f"wrong result: off by {error:.2g}"
    return ""
