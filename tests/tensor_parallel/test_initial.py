"""Initial weights are the same on any number of ranks, and seeds agree."""

import re

import pytest
import torch

from varcomm import ArgumentError, DisagreementError, VarcommError
from varcomm.ops.digest import digest
from varcomm.sharding import ShardSpec
from varcomm.tensor_parallel.agreement import agree_on_layer, module_seed
from varcomm.tensor_parallel.initial import initialised
from varcomm.transport.group import resolve


def normal(tensor, generator):
    tensor.normal_(generator=generator)


# shape, dim, sizes of blocks on 3 ranks
CASES = {
    "rows": ((150, 300), 0, [[70, 0, 80]]),
    "columns": ((70, 600), 1, [[255, 2, 343]]),
    "fused": ((200, 20), 0, [[10, 20, 34], [0, 0, 64], [1, 70, 1]]),
    "vector": ((40_000,), 0, [[16_383, 2, 23_615]]),
    "last of three": ((65, 3, 5), 2, [[2, 0, 3]]),
    "of three": ((3, 300, 2), 1, [[100, 100, 100]]),
    "nothing": ((0, 4), 0, [[0, 0, 0]]),
}


def parts(rank, name, dtype):
    shape, dim, blocks = CASES[name]
    own = initialised(shape, ShardSpec.of(blocks, dim), normal, 11, dtype)
    return ShardSpec.of(blocks, dim).gather(own)


@pytest.mark.parametrize("name", CASES)
def test_same_on_any_number_of_ranks(worlds, name):
    shape, _, _ = CASES[name]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        want = initialised(shape, None, normal, 11, dtype)
        assert (want.shape, want.dtype) == (shape, dtype)
        for got in worlds.run(3, parts, name, dtype):
            assert torch.equal(got, want)


def test_narrow_floats_are_rounded_from_fp32():
    wide = initialised((70, 300), None, normal, 3, torch.float32)
    assert torch.equal(initialised((70, 300), None, normal, 3, torch.bfloat16), wide.bfloat16())


def test_tiles_differ_and_are_of_the_distribution():
    weight = initialised((256, 1024), None, normal, 5)
    tiles = weight.view(4, 64, 4, 256).transpose(1, 2).reshape(16, -1)
    assert len(tiles.unique(dim=0)) == 16
    assert abs(float(weight.mean())) < 5 / 512
    assert abs(float(weight.std()) - 1) < 5 / 512
    correlations = torch.corrcoef(tiles) - torch.eye(16)
    assert float(correlations.abs().max()) < 5 / 128


def test_seeds_give_other_weights():
    """Also those that differ only above the 32 bits that torch's CPU generators use."""
    weights = [initialised((4, 4), None, normal, seed) for seed in (1, 2, 1 + 2**32, -1)]
    assert len(torch.stack(weights).unique(dim=0)) == 4


def test_only_own_tiles_are_drawn(worlds):
    assert worlds.run(3, count_tiles) == [1, 1, 3]


def count_tiles(rank):
    drawn = []
    spec = ShardSpec.of([64, 1, 128])
    initialised((193, 256), spec, lambda t, g: drawn.append(t.shape), 0)
    return len(drawn)


def test_scalar_and_meta():
    assert initialised((), None, normal, 1).shape == ()
    weight = initialised((10**9, 10**6), None, normal, 1, torch.float16, "meta")
    assert (weight.is_meta, weight.shape) == (True, (10**9, 10**6))


def of_another_size(rank):
    try:
        initialised((4, 2), ShardSpec.of([1, 2]), normal, 1)
    except ArgumentError as error:
        return str(error)
    return "no error"


def test_spec_of_another_size(worlds):
    for answer in worlds.run(2, of_another_size):
        assert re.search(r"is of 3 rows along dim 0; got \(4, 2\)", answer)


def seeds(rank):
    torch.manual_seed(rank)
    one, other = module_seed(), module_seed()
    torch.manual_seed(rank)
    return one, other, *agree_on_layer("Layer", lambda: {"width": 3, "bias": None}, resolve(None))


def test_first_rank_decides_on_the_seed(worlds):
    answers = worlds.run(3, seeds)
    assert answers == answers[:1] * 3
    one, other, arguments, again = answers[0]
    assert one == again != other
    assert arguments == {"width": 3, "bias": None}


def disagreeing(rank, how):
    def arguments():
        if how == "raises" and rank == 1:
            raise ArgumentError("width must be odd.")
        return {"width": 3, "bias": rank == 2}

    try:
        agree_on_layer("Layer", arguments, resolve(None))
    except VarcommError as error:
        return type(error), str(error)
    return None


def test_arguments_are_compared(worlds):
    text = "Layer: ranks disagree on bias: rank 0 has False; rank 2 has True."
    assert worlds.run(3, disagreeing, "differ") == [(DisagreementError, text)] * 3
    text = "Layer: refused on rank 1 of 3: width must be odd."
    assert worlds.run(3, disagreeing, "raises") == [(ArgumentError, text)] * 3


def test_digests_tell_tensors_apart():
    x = torch.arange(6.0).view(2, 3)
    assert digest(x.t().contiguous().t()) == digest(x)
    others = [x.t(), x.double(), x + 1, x.view(-1), x[:0]]
    assert len({digest(x), *map(digest, others)}) == 6
