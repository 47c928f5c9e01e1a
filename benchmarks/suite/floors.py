"""Bare schedules: the same results from the engine's own calls, without autograd and checks.

Each makes a new output, as varcomm does, and moves uneven shards directly from the input to the
output if its calls allow this.
"""

from functools import cache, partial
from itertools import accumulate

import torch
import torch.distributed as dist

from varcomm.cli.workload import ROOT

TAG = 7
BLOCK = 256 * 1024  # elements that are widened at once, so that they stay in the cache


def schedules(engine, primitive, layout):
    """Return the schedules of an engine for a primitive, by name."""
    exchange, call, messages, one_call = {
        "gloo": (gloo_exchange, dist.all_to_all_single, "send/recv", "all_to_all_single"),
        "nccl": (nccl_exchange, dist.all_to_all_single, "send/recv", "all_to_all_single"),
        "mpi": (mpi_exchange, mpi_all_to_all, "Isend/Irecv", "Alltoallv"),
    }[engine]
    ways = {
        messages: partial(BY_MESSAGES[primitive], exchange),
        one_call: partial(BY_ALL_TO_ALL[primitive], call),
    }
    if engine == "mpi" and primitive in MPI:
        ways[f"{primitive.replace('_', '').capitalize()}v"] = MPI[primitive]
    if engine == "gloo" and primitive == "all_gather":
        ways["broadcasts"] = broadcasts
    if engine == "nccl" and primitive == "all_gather":
        ways["all_gather"] = nccl_all_gather
    if engine != "mpi" and primitive == "reduce_scatter" and layout.dtype.itemsize >= 4:
        # torch sums fp16 and bf16 in their dtype, which is another result
        ways["reduce_scatter"] = reduce_scatter
    return {name: partial(way, layout=layout) for name, way in ways.items()}


# Primitives made of messages; exchange(pieces, places) moves all but this rank's own piece.


def all_gather(exchange, x, layout):
    out = x.new_empty(layout.total, layout.width)
    places = out.split(layout.sizes)
    exchange([x] * layout.world, places)
    places[layout.rank].copy_(x)
    return out


def reduce_scatter_by_messages(exchange, x, layout):
    parts = x.split(layout.sizes)
    got = list(x.new_empty(layout.world, layout.mine, layout.width).unbind())
    exchange(parts, got)
    got[layout.rank] = parts[layout.rank]
    return summed(got)


def all_to_all(exchange, x, layout):
    out = x.new_empty(sum(layout.recv), layout.width)
    given, places = x.split(layout.send), out.split(layout.recv)
    exchange(given, places)
    places[layout.rank].copy_(given[layout.rank])
    return out


def gather(exchange, x, layout):
    nothing = [x[:0]] * layout.world
    if layout.rank != ROOT:
        exchange([x, *nothing[1:]], nothing)
        return x[:0]
    out = x.new_empty(layout.total, layout.width)
    places = out.split(layout.sizes)
    exchange(nothing, places)
    places[ROOT].copy_(x)
    return out


def scatter(exchange, x, layout):
    nothing, out = [x[:0]] * layout.world, x.new_empty(layout.mine, layout.width)
    if layout.rank == ROOT:
        parts = x.split(layout.sizes)
        exchange(parts, nothing)
        return out.copy_(parts[ROOT])
    exchange(nothing, [out, *nothing[1:]])
    return out


# Primitives made of one call with uneven rows; call(out, data, recv, send).


def all_gather_by_call(call, x, layout):
    out = x.new_empty(layout.total, layout.width)
    call(out, x.repeat(layout.world, 1), layout.recv, layout.send)
    return out


def reduce_scatter_by_call(call, x, layout):
    got = x.new_empty(layout.world, layout.mine, layout.width)
    call(got.view(-1, layout.width), x, layout.recv, layout.send)
    return summed(got.unbind())


def move(call, x, layout):
    out = x.new_empty(sum(layout.recv), layout.width)
    call(out, x, layout.recv, layout.send)
    return out


def picking(way):
    return lambda how, x, layout: way(how, x.index_select(0, layout.index), layout)


def summing(way):
    def sum_rows(how, x, layout):
        back = way(how, x, layout)
        if back.is_cpu or back.dtype.itemsize >= 4:  # torch on a CPU sums in fp32 by itself
            return back.new_zeros(layout.mine, layout.width).index_add_(0, layout.home, back)
        total = torch.zeros(layout.mine, layout.width, dtype=torch.float32, device=x.device)
        return total.index_add_(0, layout.home, back.float()).to(x.dtype)

    return sum_rows


BY_MESSAGES = {
    **{"all_gather": all_gather, "reduce_scatter": reduce_scatter_by_messages},
    **{"all_to_all": all_to_all, "gather": gather, "scatter": scatter},
    **{"pick_rows": picking(all_to_all), "sum_rows": summing(all_to_all)},
}
BY_ALL_TO_ALL = {
    **{"all_gather": all_gather_by_call, "reduce_scatter": reduce_scatter_by_call},
    **dict.fromkeys(("all_to_all", "gather", "scatter"), move),
    **{"pick_rows": picking(move), "sum_rows": summing(move)},
}


def summed(parts):
    """Sum in rank order; fp16 and bf16 in fp32, rounded once, and block by block."""
    first, *others = parts
    if not others:
        return first.clone()
    if first.dtype.itemsize >= 4:
        total = torch.add(first, others[0])
        for part in others[1:]:
            total += part
        return total
    if not first.is_cpu or first.numel() <= BLOCK:
        return widened(parts).to(first.dtype)
    total = torch.empty_like(first)
    split = (part.view(-1).split(BLOCK) for part in (total, *parts))
    for place, *blocks in zip(*split, strict=True):
        place.copy_(widened(blocks))
    return total


def widened(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total


def gloo_exchange(given, places):
    """Exchange with calls of the group, which cost less than isend and irecv."""
    group, rank = dist.group.WORLD, dist.get_rank()
    others = [peer for peer in range(len(given)) if peer != rank]
    works = [group.recv([places[peer]], peer, TAG) for peer in others if len(places[peer])]
    works += [group.send([given[peer]], peer, TAG) for peer in others if len(given[peer])]
    for work in works:
        work.wait()


def nccl_exchange(given, places):
    """Exchange with one group of calls."""
    others = [peer for peer in range(len(given)) if peer != dist.get_rank()]
    calls = [dist.P2POp(dist.irecv, places[peer], peer) for peer in others if len(places[peer])]
    calls += [dist.P2POp(dist.isend, given[peer], peer) for peer in others if len(given[peer])]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


def broadcasts(x, layout):
    """Broadcast each shard into its place, all at the same time."""
    out = x.new_empty(layout.total, layout.width)
    places = out.split(layout.sizes)
    places[layout.rank].copy_(x)
    roots = [src for src, size in enumerate(layout.sizes) if size]
    for work in [dist.broadcast(places[src], src, async_op=True) for src in roots]:
        work.wait()
    return out


def nccl_all_gather(x, layout):
    """Gather into views of the output: for uneven shards, one group of broadcasts."""
    out = x.new_empty(layout.total, layout.width)
    dist.all_gather(list(out.split(layout.sizes)), x)
    return out


def reduce_scatter(x, layout):
    out = x.new_empty(layout.mine, layout.width)
    dist.reduce_scatter(out, list(x.split(layout.sizes)))
    return out


@cache
def mpi():
    from mpi4py import MPI

    return MPI


def memory(x):
    """Return the memory of a tensor as bytes, for MPI."""
    return x.view(-1).view(torch.uint8).numpy()


def counted(x, rows):
    """Return a tensor with the bytes per rank and their offsets, for MPI."""
    counts = [count * x.shape[1] * x.element_size() for count in rows]
    return [memory(x), counts, list(accumulate(counts, initial=0))[:-1], mpi().BYTE]


def mpi_exchange(given, places):
    world = mpi().COMM_WORLD
    others = [peer for peer in range(len(given)) if peer != world.rank]
    requests = [world.Irecv(memory(places[i]), i, TAG) for i in others if len(places[i])]
    requests += [world.Isend(memory(given[i]), i, TAG) for i in others if len(given[i])]
    mpi().Request.Waitall(requests)


def mpi_all_to_all(out, data, recv, send):
    mpi().COMM_WORLD.Alltoallv(counted(data, send), counted(out, recv))


def mpi_all_gather(x, layout):
    out = x.new_empty(layout.total, layout.width)
    mpi().COMM_WORLD.Allgatherv(memory(x), counted(out, layout.sizes))
    return out


def mpi_gather(x, layout):
    if layout.rank != ROOT:
        mpi().COMM_WORLD.Gatherv(memory(x), None, ROOT)
        return x[:0]
    out = x.new_empty(layout.total, layout.width)
    mpi().COMM_WORLD.Gatherv(memory(x), counted(out, layout.sizes), ROOT)
    return out


def mpi_scatter(x, layout):
    out = x.new_empty(layout.mine, layout.width)
    full = counted(x, layout.sizes) if layout.rank == ROOT else None
    mpi().COMM_WORLD.Scatterv(full, memory(out), ROOT)
    return out


MPI = {"all_gather": mpi_all_gather, "gather": mpi_gather, "scatter": mpi_scatter}
