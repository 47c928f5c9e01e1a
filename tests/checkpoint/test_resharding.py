"""Saved on P ranks and loaded on Q: uneven and empty, along any dimension, in fused blocks."""

import pytest
import torch

from tests.worlds import on_ranks
from varcomm.checkpoint import load, read, save
from varcomm.sharding import Box, Sharded, ShardSpec
from varcomm.sizes import ShardSizes

NAMES = ("float64", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64")
DTYPES = [getattr(torch, name) for name in NAMES]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 5), (5, 3))]


def drawn(*shape):
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(3))


# by name: a tensor, and the dimensions that are cut where it is saved and where it is loaded
WHOLES = {f"cut.{dtype}": (drawn(7, 5, 2).to(dtype), 0, 1) for dtype in DTYPES} | {
    "last": (drawn(3, 4, 6), 2, 0),
    "few rows": (drawn(1, 9), 0, 1),
    "no rows": (drawn(0, 3), 0, 1),
    "no columns": (drawn(4, 0), 0, 1),
    "one dimension": (drawn(11), 0, 0),
}


def uneven(total, ranks):
    """All on the last rank, but for one row on each in between; none on the first."""
    rest = [0] + [1] * (ranks - 2) if ranks > 1 else []
    rest = rest if sum(rest) <= total else [0] * (ranks - 1)
    return ShardSizes([*rest, total - sum(rest)])


def parts(ranks, saving):
    """The state on this rank, and what it has of each whole: in one block, and in two."""
    state, expected, made = {}, {}, torch.clone if saving else torch.zeros_like
    for name, (whole, first, second) in WHOLES.items():
        dim = first if saving else second
        total = whole.shape[dim]
        one = uneven(total, ranks) if saving else ShardSizes.balanced(total, ranks)
        fused = [ShardSizes.balanced(total // 3, ranks), uneven(total - total // 3, ranks)]
        for suffix, sizes in (("", one), (" fused", fused)):
            spec = ShardSpec.of(sizes, dim)
            own = expected[name + suffix] = spec.shard(whole)
            state[name + suffix] = Sharded.of(made(own), spec)
    cuts = (uneven if saving else ShardSizes.balanced)(13, ranks)
    return state, expected, cuts


def saved(rank, ranks, folder):
    state, _, cuts = parts(ranks, saving=True)
    flat = torch.arange(13.0).split(cuts)[rank]
    state["flat"] = Sharded.elements(flat, (13,), cuts.offsets[rank])
    save({"tensors": state, "replicated": torch.arange(4), "scalar": torch.tensor(2.5)}, folder)


def loaded(rank, ranks, folder):
    state, expected, cuts = parts(ranks, saving=False)
    flat = torch.zeros(cuts[rank])
    state["flat"] = Sharded.elements(flat, (13,), cuts.offsets[rank])
    whole = {"tensors": state, "replicated": torch.zeros(4).long(), "scalar": torch.zeros(())}
    load(whole, folder)
    for name, own in expected.items():
        assert torch.equal(bits(state[name].local), bits(own)), name
    assert flat.tolist() == list(cuts.range(rank))
    assert whole["replicated"].tolist() == [0, 1, 2, 3]
    assert whole["scalar"].item() == 2.5


def bits(tensor):
    """float8 tensors cannot be compared."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), *SLOW])
def test_saved_on_some_ranks_and_loaded_on_others(worlds, tmp_path, before, after):
    worlds.run(before, saved, before, tmp_path)
    worlds.run(after, loaded, after, tmp_path)
    found = read(tmp_path)["tensors"]  # without torch.distributed
    for name, (whole, *_) in WHOLES.items():
        for copy in (found[name], found[f"{name} fused"]):
            assert copy.dtype == whole.dtype
            assert torch.equal(bits(copy), bits(whole)), name


@on_ranks(3)
def test_what_each_rank_writes(rank, tmp_path):
    """Empty shards write nothing; a box on two ranks is written once; the load is evened out."""
    folder = tmp_path
    sizes = [4, 0, 0]
    save({"w": Sharded.of(torch.zeros(sizes[rank], 2), ShardSpec.of(sizes))}, folder / "empty")
    boxes = [Box((rank // 2 * 2, 0), torch.full((2, 3), float(rank // 2)))]
    save({"w": Sharded((4, 3), boxes, torch.float32)}, folder / "copies")
    save({str(number): torch.zeros(1000) for number in range(6)}, folder / "even")
    # elements of a matrix in the order of its rows become columns
    start, stop = [(0, 5), (5, 5), (5, 12)][rank]
    flat = Sharded.elements(torch.arange(12.0)[start:stop], (3, 4), start)
    save({"w": flat}, folder / "flat")
    spec = ShardSpec.of([3, 0, 1], 1)
    target = torch.zeros(3, spec.local)
    load({"w": Sharded.of(target, spec)}, folder / "flat")
    assert torch.equal(target, spec.shard(torch.arange(12.0).view(3, 4)))
    empty, copies, even = (
        {path.stem[-1]: path.stat().st_size for path in (folder / name).rglob("rank-*")}
        for name in ("empty", "copies", "even")
    )
    assert [*empty] == ["0"]
    assert sorted(copies) == ["0", "2"]
    assert read(folder / "copies")["w"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert len(even) == 3
    assert max(even.values()) < 1.01 * min(even.values())


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    z = torch.complex(x, -x).conj()
    state = {"x": x, "t": x.T, "row": x[1], "z": z, "minus": z.imag, "every": x[:, ::2]}
    expected = {name: value.clone() for name, value in state.items()}
    save(state, tmp_path)
    for name, value in read(tmp_path).items():
        assert torch.equal(value, expected[name]), name
