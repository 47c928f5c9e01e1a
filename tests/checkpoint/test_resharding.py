"""Saved on P ranks and loaded on Q: uneven and empty, along any dimension, in fused blocks."""

import pytest
import torch

from varcomm.checkpoint import load, read, save
from varcomm.sharding import Box, Sharded, ShardSpec
from varcomm.sizes import ShardSizes

DTYPES = (
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
    torch.complex64,
)
PAIRS = [
    (3, 1),
    (1, 3),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 5), (5, 3))),
]


def wholes():
    """By name: a tensor, and the dimensions that are cut where it is saved and where loaded."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for dtype in DTYPES:
        values = torch.randint(0, 100, (7, 5, 2), generator=generator)
        found[f"cut.{dtype}"] = (values.to(dtype), 0, 1)
    found["last"] = (torch.randn(3, 4, 6, generator=generator), 2, 0)
    found["few rows"] = (torch.randn(1, 9, generator=generator), 0, 1)
    found["no rows"] = (torch.randn(0, 3, generator=generator), 0, 1)
    found["no columns"] = (torch.randn(4, 0, generator=generator), 0, 1)
    found["one dimension"] = (torch.randn(11, generator=generator), 0, 0)
    return found


def sizes_of(total, ranks, kind):
    if kind == "balanced":
        return ShardSizes.balanced(total, ranks)
    # all on the last but one, or uneven: none on the first
    rest = [0] + [1] * (ranks - 2) if ranks > 1 else []
    rest = rest if sum(rest) <= total else [0] * (ranks - 1)
    return ShardSizes([*rest, total - sum(rest)])


def fused(total, ranks):
    """Two blocks, of which ranks have other parts."""
    first = total // 3
    return [ShardSizes.balanced(first, ranks), sizes_of(total - first, ranks, "uneven")]


def parts(ranks, place):
    """The state on this rank, and what of each whole it has; `place` is 0 to save and 1 to load."""
    state, expected = {}, {}
    for name, (whole, *dims) in wholes().items():
        dim = dims[place]
        kind = "uneven" if place == 0 else "balanced"
        specs = {
            "": ShardSpec.of(sizes_of(whole.shape[dim], ranks, kind), dim),
            " fused": ShardSpec.of(fused(whole.shape[dim], ranks), dim),
        }
        for suffix, spec in specs.items():
            own = spec.shard(whole)
            expected[name + suffix] = own
            state[name + suffix] = Sharded.of(own.clone(), spec)
    return state, expected


def saved(rank, ranks, folder):
    state, _ = parts(ranks, 0)
    whole = torch.arange(13.0)
    cuts = sizes_of(13, ranks, "uneven")
    flat = whole[cuts.range(rank).start : cuts.range(rank).stop]
    state["flat"] = Sharded.elements(flat, (13,), cuts.range(rank).start)
    save({"tensors": state, "replicated": torch.arange(4), "scalar": torch.tensor(2.5)}, folder)


def loaded(rank, ranks, folder):
    state, expected = parts(ranks, 1)
    for tensor in state.values():
        for box in tensor.boxes:
            box.tensor.zero_()
    cuts = sizes_of(13, ranks, "balanced")
    flat = torch.zeros(cuts[rank])
    state["flat"] = Sharded.elements(flat, (13,), cuts.range(rank).start)
    whole = {"tensors": state, "replicated": torch.zeros(4, dtype=torch.int64)}
    whole["scalar"] = torch.zeros(())
    load(whole, folder)
    return (
        all(torch.equal(bits(state[name].local), bits(own)) for name, own in expected.items())
        and flat.tolist() == list(cuts.range(rank))
        and whole["replicated"].tolist() == [0, 1, 2, 3]
        and whole["scalar"].item() == 2.5
    )


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_saved_on_some_ranks_and_loaded_on_others(worlds, tmp_path, before, after):
    worlds.run(before, saved, before, tmp_path)
    assert all(worlds.run(after, loaded, after, tmp_path))
    found = read(tmp_path)["tensors"]  # without torch.distributed
    for name, (whole, *_) in wholes().items():
        for copy in (found[name], found[f"{name} fused"]):
            assert copy.dtype == whole.dtype
            assert torch.equal(bits(copy), bits(whole))


def bits(tensor):
    """float8 tensors cannot be compared."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def saved_elements(rank, folder):
    """Three ranks have the elements of a matrix in the order of its rows, one of them none."""
    start, stop = [(0, 5), (5, 5), (5, 12)][rank]
    save({"w": Sharded.elements(torch.arange(12.0)[start:stop], (3, 4), start)}, folder)


def loaded_columns(rank, folder):
    spec = ShardSpec.of([3, 0, 1], 1)
    target = torch.zeros(3, spec.local)
    load({"w": Sharded.of(target, spec)}, folder)
    return torch.equal(target, spec.shard(torch.arange(12.0).view(3, 4)))


def test_flat_pieces_become_columns(worlds, tmp_path):
    worlds.run(3, saved_elements, tmp_path)
    assert worlds.run(3, loaded_columns, tmp_path) == [True] * 3


def sizes_of_files(folder):
    return {path.stem[-1]: path.stat().st_size for path in folder.rglob("*.safetensors")}


def writers(rank, folder):
    """Empty shards write nothing; a box on two ranks is written once; the load is evened out."""
    spec = ShardSpec.of([4, 0, 0])
    save({"w": Sharded.of(torch.zeros([4, 0, 0][rank], 2), spec)}, folder / "empty")
    boxes = [Box((rank // 2 * 2, 0), torch.full((2, 3), float(rank // 2)))]
    save({"w": Sharded((4, 3), boxes, torch.float32)}, folder / "copies")
    save({str(number): torch.zeros(1000) for number in range(6)}, folder / "even")


def test_what_each_rank_writes(worlds, tmp_path):
    worlds.run(3, writers, tmp_path)
    assert [*sizes_of_files(tmp_path / "empty")] == ["0"]
    assert sorted(sizes_of_files(tmp_path / "copies")) == ["0", "2"]
    assert read(tmp_path / "copies")["w"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    sizes = sorted(sizes_of_files(tmp_path / "even").values())
    assert len(sizes) == 3
    assert sizes[2] < 1.01 * sizes[0]


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    z = torch.complex(x, -x).conj()
    state = {"x": x, "t": x.T, "row": x[1], "z": z, "minus": z.imag, "every": x[:, ::2]}
    expected = {name: value.clone() for name, value in state.items()}
    save(state, tmp_path)
    for name, value in read(tmp_path).items():
        assert torch.equal(value, expected[name]), name
