"""Layers with a sharded table: initial values, state dicts, from torch's embedding and back."""

import copy

import pytest
import torch

from tests.tensor_parallel.embeddings import H, V, drawn_ids
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel.embedding import FeatureParallelEmbedding, VocabParallelEmbedding

LAYERS = [VocabParallelEmbedding, FeatureParallelEmbedding]
WIDTHS = (150, 300)  # of several tiles in both dimensions


def tables(rank, kind, sizes):
    torch.manual_seed(5 + rank)  # that of the first rank counts
    answers = []
    for padding in (None, 70, -1):
        layer = kind(*WIDTHS, sizes, padding)
        again = kind(*WIDTHS, sizes, padding, init=lambda t, g: t.uniform_(2, 3, generator=g))
        answers += [layer.spec.gather(layer.weight.detach()), again.to_embedding().weight.detach()]
    layer.reset_parameters()
    return [*answers, layer.to_embedding().weight.detach()]


@pytest.mark.parametrize("kind", LAYERS)
def test_the_same_table_on_any_number_of_ranks(worlds, kind):
    (alone,) = worlds.run(1, tables, kind, None)
    width = WIDTHS[LAYERS.index(kind)]
    for ranks in (2, 3):
        for sizes in (None, [0] * (ranks - 1) + [width], [width - 1, 1] + [0] * (ranks - 2)):
            for answers in worlds.run(ranks, tables, kind, sizes):
                assert all(map(torch.equal, answers, alone))


def test_initial_values(worlds):
    (plain, uniform, padded, other, last, _, anew) = worlds.run(
        1, tables, VocabParallelEmbedding, None
    )[0]
    assert abs(float(plain.mean())) < 5 / 212
    assert abs(float(plain.std()) - 1) < 5 / 212
    assert (uniform.min() >= 2, uniform.max() <= 3) == (True, True)
    for table, padding in ((padded, 70), (other, 70), (last, 149), (anew, 149)):
        assert torch.nonzero((table == 0).all(1)).tolist() == [[padding]]
    assert not torch.equal(last, anew)


def in_use(rank):
    torch.manual_seed(0)
    whole = torch.nn.Embedding(V, H, 4, dtype=torch.float64)
    ids = drawn_ids(6, 2)
    want, state = whole(ids), torch.get_rng_state()
    by_ids, by_columns = (kind.from_embedding for kind in LAYERS)
    layers = {
        "by ids": by_ids(whole, [2, 0, 9]),
        "parts": by_ids(whole, sequence_sizes=[1, 2, 3]),
        "sums of parts": by_ids(whole, sequence_sizes=[1, 2, 3], exchange="sum"),
        "columns": by_columns(whole),
        "own columns": by_columns(whole, [0, 1, 2]),
    }
    wanted = dict.fromkeys(("parts", "sums of parts"), want.split([1, 2, 3])[rank])
    right = {
        name: torch.equal(layer(ids), wanted.get(name, want))
        and torch.equal(layer.to_embedding().weight, whole.weight)
        and layer.to_embedding().padding_idx == 4
        for name, layer in layers.items()
    }
    other = layers["parts"](ids, [6, 0, 0])
    right["other parts"] = torch.equal(other, want[: 6 * (rank == 0)])
    copied = copy.deepcopy(layers["by ids"])
    right["copy"] = torch.equal(copied(ids), want) and shard_spec(copied.weight) is copied.spec
    right["random"] = torch.equal(torch.get_rng_state(), state)
    return right, {name: tuple(layer.weight.shape) for name, layer in layers.items()}


def test_from_embedding_and_back(worlds):
    shapes = {"parts": [(4, H), (4, H), (3, H)], "by ids": [(2, H), (0, H), (9, H)]}
    shapes["sums of parts"] = shapes["parts"]
    shapes |= {"columns": [(V, 1)] * 3, "own columns": [(V, 0), (V, 1), (V, 2)]}
    for rank, (right, got) in enumerate(worlds.run(3, in_use)):
        assert set(right.values()) == {True}, right
        assert got == {name: shape[rank] for name, shape in shapes.items()}
