"""Wrong use of embeddings: an error on every rank, before anybody waits."""

import re

import pytest
import torch

import varcomm
from varcomm import ArgumentError, DisagreementError, VarcommError
from varcomm.tensor_parallel.embedding import (
    FeatureParallelEmbedding,
    VocabParallelEmbedding,
    feature_parallel_embedding,
    vocab_parallel_embedding,
)

IDS = torch.tensor([0, 4, 2])
F = torch.zeros


def by_ids(ids=IDS, weight=None, sizes=(2, 3), **options):
    return lambda rank: vocab_parallel_embedding(
        ids, F(sizes[rank], 2) if weight is None else weight, sizes, **options
    )


def by_features(ids=IDS, weight=None, sizes=(2, 3), **options):
    return lambda rank: feature_parallel_embedding(
        ids, F(5, sizes[rank]) if weight is None else weight, sizes, **options
    )


# made on both ranks alike; what each rank says
CALLS = {
    "too large": (by_ids(IDS + 1), r"ids span 1...5, out of range for 5 embeddings"),
    "negative": (by_ids(IDS - 1, method="indexed"), "ids span -1...3, out of range for 5 emb"),
    "parts": (by_ids(IDS + 1, sequence_sizes=[1, 2]), "ids span 1...5, out of range"),
    "floats": (by_ids(IDS.float()), "ids must be of torch.int64 or torch.int32; got torch.float"),
    "empty": (by_ids(F(0)), "got torch.float32. Give an empty one its dtype."),
    "no ids": (by_ids([0]), "ids must be a torch.Tensor; got list"),
    "device": (by_ids(IDS.to("meta")), "ids are on meta, weight is on cpu"),
    "weight": (by_ids(weight=F(1, 2, 2)), r"weight must have two dimensions, .* \(1, 2, 2\)"),
    "shard": (by_ids(weight=F(5, 2)), r"has 5 rows along dim 0, but sizes\[.\] is . "),
    "bools": (by_ids(weight=F(2, 2).bool()), "a sum of torch.bool is not defined"),
    "method": (by_ids(method="fast"), "one of .'auto', 'masked', 'indexed'.; got 'fast'"),
    "flag": (by_ids(input_is_parallel=1), "input_is_parallel must be True or False; got 1"),
    "padding": (by_ids(padding_idx=5), "padding_idx must be one of all 5 ids, not of .* got 5"),
    "no padding": (by_ids(padding_idx=1.0), "padding_idx must be one of all 5 ids.* got 1.0"),
    "sequence": (by_ids(sequence_sizes=[1, 1]), "has 3 rows .* but sequence_sizes sum to 2"),
    "scalar": (by_ids(IDS[0], sequence_sizes=[1, 0]), "dim=0 is out of range .* A scalar has no"),
    "own scalar": (by_ids(IDS[0], input_is_parallel=True), "dim=0 is out of range"),
    "own part": (
        by_ids(input_is_parallel=True, sequence_sizes=[4, 4]),
        r"has 3 rows along dim 0, but sequence_sizes\[.\] is 4",
    ),
    "own ids": (
        by_ids(IDS + 1, input_is_parallel=True),
        "the ids that a rank brings are wrong: .*needed spans 1...5, out of range for 5 global",
    ),
    "all own ids": (
        by_ids(IDS + 1, input_is_parallel=True, method="masked"),
        "ids span 1...5, out of range for 5 embeddings",
    ),
    "features": (by_features(IDS + 1), "ids span 1...5, out of range for 5 embeddings"),
    "columns": (by_features(weight=F(5, 1)), r"has 1 rows along dim 1, but sizes\[.\] is ."),
    "gather": (by_features(gather_output=None), "gather_output must be True or False; got None"),
    "feature ids": (by_features(IDS.double()), "ids must be of torch.int64 or torch.int32"),
    "feature padding": (by_features(padding_idx=-6), "padding_idx must be one of all 5 ids"),
}


def refused(rank, name):
    try:
        CALLS[name][0](rank)
    except ArgumentError as error:
        return str(error), varcomm.all_reduce(torch.ones(())).item()
    return "no error", 0.0


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(worlds, name):
    for text, usable in worlds.run(2, refused, name):
        assert re.search(CALLS[name][1], text), text
        assert usable == 2.0


def id_of_one_rank(rank, debugging, **options):
    ids = IDS + 3 * (rank == 1)
    try:
        if not debugging:
            by_ids(ids, input_is_parallel=True, **options)(rank)
        with varcomm.debug():
            by_ids(ids, **options)(rank)
    except VarcommError as error:
        return str(error)
    return "no error"


def test_an_id_out_of_range_on_one_rank(worlds):
    """Own ids are checked by all always, whole ones where ranks compare."""
    for text in worlds.run(2, id_of_one_rank, False):
        assert re.search("refused on rank 1 of 2: needed spans 3...7, out of range", text)
    first, second = worlds.run(2, id_of_one_rank, True)
    assert re.search("not called, since on rank 1: .* ids span 3...7, out of range", first)
    assert re.search("ids span 3...7, out of range|not called, since on rank 1", second)


# what differs between ranks, and what all are told
DIFFERENT = {
    "ids": (lambda rank: by_ids(IDS + (rank == 1) * torch.tensor([1, 0, 0]))(rank), "ids"),
    "padding": (lambda rank: by_ids(padding_idx=rank)(rank), "padding_idx"),
    "method": (lambda rank: by_ids(method=("masked", "indexed")[rank])(rank), "method"),
    "parts": (lambda rank: by_ids(sequence_sizes=[rank, 3 - rank])(rank), "sequence_sizes"),
    "features": (lambda rank: by_features(IDS.flip(0) if rank else IDS)(rank), "ids"),
}


def differing(rank, name):
    try:
        with varcomm.debug():
            DIFFERENT[name][0](rank)
    except DisagreementError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", DIFFERENT)
def test_differences_inside_debug(worlds, name):
    text = f"_parallel_embedding: ranks disagree on {DIFFERENT[name][1]}: rank 0 has"
    assert all(text in answer for answer in worlds.run(2, differing, name))


def right_inside_debug(rank):
    weight, plain = F(2 + rank, 2).requires_grad_(), []
    with varcomm.debug():
        for options in ({}, {"method": "masked"}, {"sequence_sizes": [1, 2]}):
            plain.append(by_ids(weight=weight, **options)(rank))
        plain.append(by_ids(IDS[: rank + 1], weight, input_is_parallel=True)(rank))
        plain.append(by_features(weight=F(5, 2 + rank).requires_grad_())(rank))
        sum(rows.sum() for rows in plain).backward()
    return [tuple(rows.shape) for rows in plain]


def test_right_calls_inside_debug(worlds):
    for rank, shapes in enumerate(worlds.run(2, right_inside_debug)):
        assert shapes == [(3, 2), (3, 2), (1 + rank, 2), (1 + rank, 2), (3, 5)]


TORCHS = torch.nn.Embedding
# made by rank 1 alone, rank 0 makes Layer(5, 2)
LAYERS = {
    "sizes": (lambda layer: layer(5, 2, [3, 3]), r"sizes \[3, 3\] sum to 6, but "),
    "count": (lambda layer: layer(-1, 2), "num_embeddings must be an int, not negative; got -1"),
    "width": (lambda layer: layer(5, 2.0), "embedding_dim must be an int, not negative; got 2.0"),
    "norm": (lambda layer: layer(5, 2, max_norm=1.0), "max_norm is not for a sharded table: it w"),
    "padding": (lambda layer: layer(5, 2, padding_idx=5), "padding_idx must be one of all 5 ids"),
    "other": (lambda layer: layer(6, 2), "ranks disagree on num_embeddings: rank 0 has 5; rank 1"),
    "dtype": (lambda layer: layer(5, 2, dtype=torch.float64), "ranks disagree on dtype"),
    "init": (lambda layer: layer(5, 2, init=3), "init must be a function of a tensor and a gene"),
    "an init": (lambda layer: layer(5, 2, init=torch.Tensor.uniform_), "disagree on an init"),
    "device": (lambda layer: layer(5, 2, device="nowhere"), "device type at start of device str"),
}
VOCABULARY = {
    "parts": (lambda layer: layer(5, 2, sequence_sizes=[1]), "sequence_sizes must have one entry"),
    "method": (lambda layer: layer(5, 2, method="x"), "method must be one of"),
    "flag": (lambda layer: layer(5, 2, input_is_parallel=0), "input_is_parallel must be True or"),
    "other method": (lambda layer: layer(5, 2, method="masked"), "ranks disagree on method"),
}
FEATURES = {
    "flag": (lambda layer: layer(5, 2, gather_output=0), "gather_output must be True or False"),
}
MADE = [
    *((VocabParallelEmbedding, name, LAYERS | VOCABULARY) for name in LAYERS | VOCABULARY),
    *((FeatureParallelEmbedding, name, LAYERS | FEATURES) for name in LAYERS | FEATURES),
]


def making(rank, number):
    kind, name, cases = MADE[number]
    try:
        cases[name][0](kind) if rank else kind(5, 2)
    except VarcommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("number", range(len(MADE)))
def test_wrong_layers_are_refused_on_all_ranks(worlds, number):
    kind, name, cases = MADE[number]
    for text in worlds.run(2, making, number):
        assert re.search(f"{kind.__name__}: .*{cases[name][1]}", text), text


# taken by rank 1 alone, rank 0 has an embedding of zeros
TAKEN = {
    "type": (lambda: torch.nn.Linear(2, 5), "embedding must be a torch.nn.Embedding; got Linear"),
    "hooks": (lambda: hooked(TORCHS(5, 2)), "embedding, of class Embedding, has hooks, which wo"),
    "norm": (lambda: TORCHS(5, 2, max_norm=1.0), "a sharded table has no max_norm"),
    "both": (
        lambda: TORCHS(5, 2, sparse=True, scale_grad_by_freq=True),
        "a sharded table has no scale_grad_by_freq and no sparse",
    ),
    "weight": (lambda: TORCHS.from_pretrained(torch.ones(5, 2)), "ranks disagree on weight"),
}


def hooked(module):
    module.register_forward_hook(lambda module, given, result: 2 * result)
    return module


def taking(rank, kind, name):
    embedding = TAKEN[name][0]() if rank else TORCHS.from_pretrained(F(5, 2))
    try:
        kind.from_embedding(embedding)
    except VarcommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, FeatureParallelEmbedding])
@pytest.mark.parametrize("name", TAKEN)
def test_embeddings_that_cannot_be_sharded(worlds, kind, name):
    for text in worlds.run(2, taking, kind, name):
        assert re.search(f"{kind.__name__}.from_embedding: .*{TAKEN[name][1]}", text), text
