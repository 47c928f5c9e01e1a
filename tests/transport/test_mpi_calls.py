"""Every call of torch.distributed on MPI against what one process computes, for every dtype."""

from functools import reduce

import pytest
import torch
import torch.distributed as dist

from conftest import WORLDS

ORDERED = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
DTYPES = (*ORDERED, torch.complex64, torch.complex128)
ODD = (0, 1, 7, 9001)  # the last is reduced by pieces in all dtypes but those of one byte

Op = dist.ReduceOp

# torch 2.13 gave them these names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def draw(dtype, n, rank, salt=0):
    """Values of `rank`, which every rank can draw; small, so that few of them round."""
    generator = torch.Generator().manual_seed(31 * rank + salt)
    whole = torch.randint(0, 3 if dtype == torch.bool else 100, (n,), generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.double(), whole.flip(0).double()).to(dtype)
    if dtype.is_floating_point:
        return (whole / 16).to(dtype)
    return (whole > 0).to(dtype) if dtype == torch.bool else whole.to(dtype)


def bits(x):
    return x.contiguous().view(-1).view(torch.uint8)


def same(x, y):
    assert x.dtype == y.dtype
    assert x.shape == y.shape
    return torch.equal(bits(x), bits(y))


def move(rank, dtype):
    """Return the names of the calls that have moved something else than they should."""
    size, wrong = dist.get_world_size(), []
    root = size - 1

    def check(name, got, want):
        if not same(got, want):
            wrong.append((name, dtype))

    for n in ODD:
        each = [draw(dtype, n, r) for r in range(size)]
        mine = each[rank]

        x = mine.clone()
        dist.broadcast(x, root)
        check("broadcast", x, each[root])

        outs = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(outs, mine)
        check("all_gather", torch.stack(outs), torch.stack(each))
        out = torch.empty_like(torch.cat(each))
        all_gather_single(out, mine)
        check("all_gather_single", out, torch.cat(each))

        outs = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        dist.gather(mine, outs, root)
        if rank == root:
            check("gather", torch.stack(outs), torch.stack(each))
        out = torch.empty_like(mine)
        dist.scatter(out, each if rank == root else None, root)
        check("scatter", out, mine)

        uneven = [draw(dtype, n + 3 * r, r) for r in range(size)]
        outs = [torch.empty_like(x) for x in uneven]
        dist.all_gather(outs, uneven[rank])
        check("all_gather, uneven", torch.cat(outs), torch.cat(uneven))

        # r sends r + s elements to s, and nothing to itself
        pieces = [
            [draw(dtype, 0 if r == s else r + s, r, s) for s in range(size)] for r in range(size)
        ]
        arriving = [torch.empty_like(pieces[r][rank]) for r in range(size)]
        dist.all_to_all(arriving, pieces[rank])
        want = torch.cat([pieces[r][rank] for r in range(size)])
        check("all_to_all", torch.cat(arriving), want)
        out = torch.empty_like(want)
        recv, send = [len(x) for x in arriving], [len(x) for x in pieces[rank]]
        dist.all_to_all_single(out, torch.cat(pieces[rank]), recv, send)
        check("all_to_all_single", out, want)

    even = torch.stack([draw(dtype, 5, rank, s) for s in range(size)])
    out = torch.empty_like(even)
    dist.all_to_all_single(out, even)
    check("even", out, torch.stack([draw(dtype, 5, r, rank) for r in range(size)]))

    if size > 1:  # around a ring, twice
        x, y = draw(dtype, 4, rank), torch.empty_like(draw(dtype, 4, 0))
        after, before = (rank + 1) % size, (rank - 1) % size
        works = [dist.isend(x, after, tag=3), dist.irecv(y, before, tag=3)]
        for work in works:
            work.wait()
        check("isend and irecv", y, draw(dtype, 4, before))
        y.zero_()
        ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        check("batch_isend_irecv", y, draw(dtype, 4, before))
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_data_move_as_bytes(mpi_worlds, world):
    for dtype in DTYPES:
        assert mpi_worlds.run(world, move, dtype) == [[]] * world


def in_rank_order(parts, step):
    """One process's answer: wide, in rank order, rounded once."""
    dtype = parts[0].dtype
    wide = dtype
    if dtype.is_floating_point and dtype.itemsize < 4:
        wide = torch.float32
    elif dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        wide = torch.int64  # the values are small and not negative
    total = reduce(step, [part.to(wide) for part in parts])
    return (total > 0 if dtype == torch.bool else total).to(dtype)


STEPS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def operators(dtype):
    if dtype.is_complex:
        return ("SUM",)  # torch.distributed refuses all others
    return ("SUM", "PRODUCT", "MIN", "MAX") if dtype.is_floating_point else tuple(STEPS)


def reductions(rank, dtype):
    size, wrong = dist.get_world_size(), []
    root = size - 1
    for name in operators(dtype):
        op = getattr(Op, name)
        for n in ODD:
            each = [draw(dtype, n, r) for r in range(size)]
            want = in_rank_order(each, STEPS[name])

            x = each[rank].clone()
            dist.all_reduce(x, op)
            if not same(x, want):
                wrong.append((name, "all_reduce", dtype, n))

            x = each[rank].clone()
            dist.reduce(x, root, op)
            if not same(x, want if rank == root else each[rank]):
                wrong.append((name, "reduce", dtype, n))

            # r has a part of n + s elements for s
            parts = [[draw(dtype, n + s, r, s) for s in range(size)] for r in range(size)]
            want = in_rank_order([parts[r][rank] for r in range(size)], STEPS[name])
            out = torch.empty_like(want)
            dist.reduce_scatter(out, parts[rank], op)
            if not same(out, want):
                wrong.append((name, "reduce_scatter", dtype, n))

            table = [draw(dtype, n * size, r) for r in range(size)]
            want = in_rank_order([x.view(size, n)[rank] for x in table], STEPS[name])
            out = torch.empty_like(want)
            reduce_scatter_single(out, table[rank], op)
            if not same(out, want):
                wrong.append((name, "reduce_scatter_single", dtype, n))
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_reductions_in_rank_order(mpi_worlds, world):
    for dtype in DTYPES:
        assert mpi_worlds.run(world, reductions, dtype) == [[]] * world


def averages(rank):
    size, got = dist.get_world_size(), {}
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.complex64):
        for n in ODD:
            x, each = draw(dtype, n, rank), [draw(dtype, n, r) for r in range(size)]
            dist.all_reduce(x, Op.AVG)
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            total = sum(part.to(wide) for part in each)
            exact = dtype == torch.int32
            if dtype.is_complex:
                want = torch.view_as_complex(torch.view_as_real(total) / size)
            else:
                want = (total // size if exact else total / size).to(dtype)
            got[str(dtype), n] = same(x, want)
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    got["premultiplied"] = x.tolist() == [size * (size + 1) / 4] * 3
    large = torch.tensor([2**63 + rank, rank], dtype=torch.uint64)
    dist.all_reduce(large, Op.MAX)
    got["uint64"] = large.tolist() == [2**63 + size - 1, size - 1]
    return [key for key, right in got.items() if not right]


@pytest.mark.parametrize("world", WORLDS)
def test_average_and_other_operators(mpi_worlds, world):
    assert mpi_worlds.run(world, averages) == [[]] * world


def layouts(rank):
    """Transposed, strided, conjugated and coalesced tensors."""
    size = dist.get_world_size()
    x = torch.arange(12.0).reshape(3, 4).t() + rank
    dist.all_reduce(x)
    want = size * torch.arange(12.0).reshape(3, 4).t() + sum(range(size))
    y = torch.zeros(10)[::2]
    outs = [torch.zeros(10)[::2] for _ in range(size)]
    dist.all_gather(outs, torch.full((10,), float(rank))[::2])
    dist.broadcast(y, 0)
    z = torch.full((2,), 1 + 1j * rank).conj()
    dist.group.WORLD.allreduce([z]).wait()
    with dist._coalescing_manager(async_ops=True) as both:
        a, b = torch.ones(3), torch.full((20_000,), float(rank))
        dist.all_reduce(a)
        dist.all_reduce(b)
    both.wait()
    objects = [None] * size
    dist.all_gather_object(objects, ("rank", rank))
    return (
        torch.equal(x, want)
        and all((out == r).all() for r, out in enumerate(outs))
        and torch.equal(z.resolve_conj(), torch.full((2,), size - 1j * sum(range(size))))
        and a.tolist() == [size] * 3
        and b.unique().tolist() == [sum(range(size))]
        and objects == [("rank", r) for r in range(size)]
    )


@pytest.mark.parametrize("world", WORLDS)
def test_tensors_of_any_layout(mpi_worlds, world):
    assert mpi_worlds.run(world, layouts) == [True] * world


def from_anyone(rank):
    size, x = dist.get_world_size(), torch.empty(1, dtype=torch.int64)
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=5)
        return []
    return sorted((dist.recv(x, tag=5), x.item()) for _ in range(size - 1))


def test_receive_from_any_rank(mpi_worlds):
    assert mpi_worlds.run(3, from_anyone)[0] == [(1, 1), (2, 2)]


def refusals(rank):
    """Each in a group of its own, where a wrong call can leave nothing behind for the next."""
    x = torch.ones(4)
    plain = {
        "MPI moves dense tensors; got one of layout torch.sparse_coo": lambda group: (
            dist.all_reduce(x.to_sparse(), group=group)
        ),
        r"BAND of torch.float32 is not defined: .*\. Convert the tensor": lambda group: (
            dist.all_reduce(x, Op.BAND, group)
        ),
        "AVG of torch.bool is not defined: it has no quotient": lambda group: dist.all_reduce(
            x > 0, Op.AVG, group
        ),
        "AVG of torch.bool is not defined: it": lambda group: dist.all_reduce_coalesced(
            [x > 0, x > 1], Op.AVG, group
        ),
        "PREMUL_SUM of torch.int64 is not defined": lambda group: dist.all_reduce(
            x.long(), dist._make_nccl_premul_sum(2.0), group
        ),
        "one tensor a rank is needed: 2; got 1": lambda group: dist.all_gather([x], x, group),
        "4 elements of torch.float32 do not fill 5 of torch.float32": lambda group: dist.all_gather(
            [torch.ones(5), torch.ones(5)], x, group
        ),
        "2 times 4 elements do not fill an output of 7": lambda group: group.all_gather_single(
            torch.ones(7), x
        ).wait(),
        "an input of 4 elements has no 2 parts of 3, which is what the output takes": (
            lambda group: group.reduce_scatter_single(torch.ones(3), x).wait()
        ),
        r"output split sizes must be .* 2, that sum to 4 rows; got \[1, 2\]": lambda group: (
            group.all_to_all_single(x.clone(), x, [1, 2], [2, 2]).wait()
        ),
        "rank 1 sent 12 bytes, where rank 0 expects 16": lambda group: send_to_one_who_expects_four(
            3, rank, group
        ),
        "recv from rank 1 on rank 0 of 2 of group '.*' failed: .*expect other sizes": (
            lambda group: send_to_one_who_expects_four(5, rank, group)
        ),
    }
    for message, wrong in plain.items():
        group = dist.new_group()
        if "rank 0" in message and rank:
            wrong(group)
        else:
            with pytest.raises(RuntimeError, match=message):
                wrong(group)
    return len(plain)


def send_to_one_who_expects_four(n, rank, group):
    if rank:
        dist.send(torch.ones(n), 0, group)
    else:
        dist.recv(torch.ones(4), 1, group)


def test_wrong_use_is_an_error(mpi_worlds):
    assert mpi_worlds.run(2, refusals) == [12, 12]
