"""Layers with a sharded table: initial values, state dicts, from torch's embedding and back."""

import copy

import pytest
import torch

from tests.tensor_parallel.embeddings import H, V, drawn_ids
from tests.worlds import group_of_one, on_ranks
from varcomm.sharding import shard_spec
from varcomm.tensor_parallel.embedding import FeatureParallelEmbedding, VocabParallelEmbedding

LAYERS = [VocabParallelEmbedding, FeatureParallelEmbedding]
WIDTHS = (150, 300)  # of several tiles in both dimensions


def tables(kind, sizes=None, seed=5, group=None):
    torch.manual_seed(seed)  # that of the first rank counts
    answers = []
    for padding in (None, 70, -1):
        layer = kind(*WIDTHS, sizes, padding, group=group)
        again = kind(
            *WIDTHS, sizes, padding, group=group, init=lambda t, g: t.uniform_(2, 3, generator=g)
        )
        answers += [layer.spec.gather(layer.weight.detach()), again.to_embedding().weight.detach()]
    layer.reset_parameters()
    return [*answers, layer.to_embedding().weight.detach()]


@pytest.mark.parametrize("kind", LAYERS)
@on_ranks(2, 3)
def test_the_same_table_on_any_number_of_ranks(rank, ranks, kind):
    alone, width = tables(kind, group=group_of_one()), WIDTHS[LAYERS.index(kind)]
    for sizes in (None, [0] * (ranks - 1) + [width], [width - 1, 1] + [0] * (ranks - 2)):
        assert all(map(torch.equal, tables(kind, sizes, 5 + rank), alone))


@on_ranks(1)
def test_initial_values(rank):
    plain, uniform, padded, other, last, _, anew = tables(VocabParallelEmbedding)
    assert abs(float(plain.mean())) < 5 / 212
    assert abs(float(plain.std()) - 1) < 5 / 212
    assert (uniform.min() >= 2, uniform.max() <= 3) == (True, True)
    for table, padding in ((padded, 70), (other, 70), (last, 149), (anew, 149)):
        assert torch.nonzero((table == 0).all(1)).tolist() == [[padding]]
    assert not torch.equal(last, anew)


@on_ranks(3)
def test_from_embedding_and_back(rank):
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
    shapes = {
        "by ids": [(2, H), (0, H), (9, H)],
        "columns": [(V, 1)] * 3,
        "own columns": [(V, 0), (V, 1), (V, 2)],
    }
    for name, layer in layers.items():
        assert torch.equal(layer(ids), wanted.get(name, want))
        assert torch.equal(layer.to_embedding().weight, whole.weight)
        assert layer.to_embedding().padding_idx == 4
        assert layer.weight.shape == shapes.get(name, [(4, H), (4, H), (3, H)])[rank]
    assert torch.equal(layers["parts"](ids, [6, 0, 0]), want[: 6 * (rank == 0)])
    copied = copy.deepcopy(layers["by ids"])
    assert torch.equal(copied(ids), want)
    assert shard_spec(copied.weight) is copied.spec
    assert torch.equal(torch.get_rng_state(), state)
