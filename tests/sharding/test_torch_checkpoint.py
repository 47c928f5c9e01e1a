"""``Sharded`` in torch's own checkpoints: right on any number of ranks, or refused by name."""

import random
from collections import Counter
from itertools import accumulate, pairwise
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.sharding import Box, Sharded, ShardSpec

DTYPES = ("float64", "bfloat16", "float16", "int64", "int8", "uint8", "bool", "float8_e4m3fn")
DTYPES += ("complex64", "complex128")  # safetensors cannot hold the last
INTEGERS = tuple(name for name in DTYPES if "int" in name or name == "bool")
SAFETENSORS = {"save_distributed": True}
CONSOLIDATED = {**SAFETENSORS, "enable_consolidation": True}

# Each writer, its arguments, its reader, and the tensors that torch cannot keep with it.
WRITERS = [
    pytest.param(FileSystemWriter, {}, FileSystemReader, (), id="files"),
    pytest.param(
        FileSystemWriter,
        {"thread_count": 2, "single_file_per_rank": False},
        FileSystemReader,
        (),
        id="files of tensors",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        HuggingFaceStorageWriter,
        SAFETENSORS,
        HuggingFaceStorageReader,
        ("complex128",),
        id="safetensors",
    ),
    pytest.param(
        HuggingFaceStorageWriter,
        CONSOLIDATED,
        HuggingFaceStorageReader,
        # as of plain tensors: an error for integers, complex ones unreadable, 0-dim ones lost
        ("complex64", "complex128", "0-dim", *INTEGERS),
        id="consolidated",
        marks=pytest.mark.slow,
    ),
]
RANKS = [
    (3, 1),
    *(pytest.param(*both, marks=pytest.mark.slow) for both in [(1, 3), (2, 5), (5, 2)]),
]


def spread(rows, ranks, seed):
    """Return sizes per rank; for three ranks and more, rank 1 has no rows."""
    full = [rank for rank in range(ranks) if rank != 1 or ranks < 3]
    counts = Counter(random.Random(seed).choices(full, k=rows))
    return [counts[rank] for rank in range(ranks)]


def values(shape, dtype="float32"):
    return torch.arange(prod(shape)).remainder(7).to(getattr(torch, dtype)).view(shape)


def kinds(rank, ranks, seed):
    """Return tensors of each kind by name: the full one, and this rank's Sharded."""
    tensors = {}

    def add(name, shape, sizes, dim=0, dtype="float32"):
        spec, whole = ShardSpec.of(sizes, dim), values(shape, dtype)
        tensors[name] = whole, Sharded.of(spec.shard(whole), spec)
        return spec, whole

    add("rows", (9, 2), spread(9, ranks, seed))
    add("columns", (2, 9), spread(9, ranks, seed + 1), dim=1)
    add("one rank", (9, 2), [9 * (r == ranks - 1) for r in range(ranks)])
    for dtype in DTYPES:
        add(dtype, (9, 2), spread(9, ranks, seed), dtype=dtype)
    blocks = [spread(rows, ranks, seed + rows) for rows in (8, 1, 5)]
    spec, whole = add("fused rows", (14, 2), blocks)
    add("fused columns", (2, 14), blocks, dim=1)
    add("fused vector", (14,), blocks)
    lazy = spec.shard(whole * (1 + 2j)).conj()
    tensors["fused conjugates"] = whole * (1 - 2j), Sharded.of(lazy, spec)
    part = spec.shard(whole)
    flat, cut = part.reshape(-1), min(3, part.numel())  # as states of an optimizer, within a row
    pieces = (flat[:cut], 0), (flat[cut:], cut)
    parts = [Sharded.elements(piece, part.shape, start, spec) for piece, start in pieces]
    boxes = [box for own in parts for box in own.boxes]
    tensors["pieces of fused rows"] = whole, Sharded(whole.shape, boxes, whole.dtype)
    for name, shape in (("elements", (5, 3, 2)), ("elements of a vector", (30,))):
        whole, sizes = values(shape), spread(30, ranks, seed + 2)
        start, stop = list(pairwise(accumulate(sizes, initial=0)))[rank]
        tensors[name] = whole, Sharded.elements(whole.reshape(-1)[start:stop], shape, start)
    scalar = torch.tensor(3.5)
    on_last = [Box((), scalar.clone())] if rank == ranks - 1 else []
    tensors["0-dim"] = scalar, Sharded((), on_last, torch.float32)
    whole = values((4, 2))
    tensors["replicated"] = whole, Sharded(whole.shape, [Box((0, 0), whole.clone())])
    half = rank % 2
    boxes = [Box((2 * half, 0), whole[2 * half :][:2].clone())] if ranks > 1 else []
    tensors["half replicated"] = whole, Sharded(whole.shape, boxes or [Box((0, 0), whole)])
    tensors["no elements"] = torch.zeros(0, 3), Sharded((0, 3), [], torch.float32)
    return tensors


def of_several_boxes(tensors):
    """Return the names of tensors that have several boxes on some rank."""
    own = [name for name, (_, sharded) in tensors.items() if len(sharded.boxes) > 1]
    shared = [None] * dist.get_world_size()
    dist.all_gather_object(shared, own)
    return {name for names in shared for name in names}


def save(rank, folder, writer, options, lost):
    """Save each kind, and return the names of tensors that were refused on all ranks."""
    tensors = kinds(rank, dist.get_world_size(), seed=1)
    refused = of_several_boxes(tensors) if writer is HuggingFaceStorageWriter else set()
    for name in sorted(refused):
        storage = writer(folder / "refused" / name, **options)
        with pytest.raises(CheckpointException) as caught:
            dcp.save({name: tensors[name][1]}, storage_writer=storage)
        errors = [error for error, _ in caught.value.failures.values()]
        assert errors, name
        for error in errors:
            assert isinstance(error, ArgumentError), repr(error)
            assert f"{name!r} has several boxes" in str(error)
    left = {name: x for name, (_, x) in tensors.items() if name not in {*refused, *lost}}
    dcp.save(left, storage_writer=writer(folder / "saved", **options))
    return refused


def load(rank, folder, reader, left_out):
    """Load each kind that was saved into other shards, and into full tensors."""
    tensors = kinds(rank, dist.get_world_size(), seed=7)
    wholes = {name: whole for name, (whole, _) in tensors.items() if name not in left_out}
    parts = {name: tensors[name][1].map(torch.zeros_like) for name in wholes}
    dcp.load(parts, storage_reader=reader(folder / "saved"))
    full = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    dcp.load(full, storage_reader=reader(folder / "saved"))
    for name, whole in wholes.items():
        assert torch.equal(full[name], whole), name
        expected = tensors[name][1].boxes
        for box, other in zip(parts[name].boxes, expected, strict=True):
            assert torch.equal(box.tensor, other.tensor), name


@pytest.mark.parametrize(("saving", "loading"), RANKS)
@pytest.mark.parametrize(("writer", "options", "reader", "lost"), WRITERS)
def test_each_kind_is_right_or_refused(
    worlds, tmp_path, writer, options, reader, lost, saving, loading
):
    refused = worlds.run(saving, save, tmp_path, writer, options, lost)
    assert all(names == refused[0] for names in refused)
    if writer is HuggingFaceStorageWriter:
        assert {"fused rows", "fused columns", "fused vector"} <= refused[0]
    worlds.run(loading, load, tmp_path, reader, {*refused[0], *lost})


@on_ranks(1)
def test_a_full_tensor_on_one_rank_needs_no_save_distributed(rank, tmp_path):
    whole = values((4, 2))
    state = {"w": Sharded(whole.shape, [Box((0, 0), whole)])}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))
    target = {"w": torch.zeros(4, 2)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(tmp_path))
    assert torch.equal(target["w"], whole)


@on_ranks(3)
def test_plain_values_make_a_folder_of_safetensors_unreadable(rank, tmp_path):
    """The page says so: torch writes their pickles in front of the header."""
    spec = ShardSpec.of([2, 0, 1])
    own = spec.shard(values((3, 2)))
    state, target = ({"w": Sharded.of(x, spec), "epoch": 5} for x in (own, own.clone()))
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(tmp_path, **SAFETENSORS))
    with pytest.raises(CheckpointException):
        dcp.load(target, storage_reader=HuggingFaceStorageReader(tmp_path))


@pytest.mark.slow
@on_ranks(3)
def test_threads_of_the_writer_lose_the_error_but_nothing_is_loaded(rank, tmp_path):
    """torch drops errors of its writer's threads; the file is left empty."""
    _, sharded = kinds(rank, 3, seed=1)["fused rows"]
    writer = HuggingFaceStorageWriter(tmp_path, thread_count=2, **SAFETENSORS)
    dcp.save({"w": sharded}, storage_writer=writer)
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(14, 2)}, storage_reader=HuggingFaceStorageReader(tmp_path))


@on_ranks(3)
def test_async_save_of_torch_is_refused(rank, tmp_path):
    _, sharded = kinds(rank, 3, seed=1)["rows"]
    with pytest.raises(ArgumentError, match="async_=True"):
        dcp.async_save({"w": sharded}, checkpoint_id=tmp_path / "saved")
