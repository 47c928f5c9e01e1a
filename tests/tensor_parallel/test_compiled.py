"""Tensor-parallel layers under torch.compile: one graph, and what they give uncompiled."""

from functools import partial

import pytest
import torch

from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.compiling import compare, compare_layers, drawn, leaf
from varcomm import tensor_parallel as tp
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    FeatureParallelEmbedding,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_cross_entropy,
    sequence_parallel,
    vocab_parallel_cross_entropy,
)

# by the number of ranks: parts of a sequence, features, classes
SEQUENCE = {1: [5], 3: [4, 0, 1]}
FEATURES = {1: [7], 3: [3, 4, 0]}
CLASSES = {1: [17], 3: [1, 0, 16]}
HIDDEN, VOCABULARY, LENGTH, BATCH = 7, 17, 5, 2


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 3], ids="world {}".format)
def world(request):
    return request.param


def part(whole, sizes, rank, dim=0):
    return leaf(whole.split(sizes, dim)[rank])


def mappings(rank, ranks):
    failures, sizes, sequence = Failures(), FEATURES[ranks], SEQUENCE[ranks]
    whole = leaf(drawn(0, LENGTH, BATCH, HIDDEN))
    columns, rows = part(whole, sizes, rank, -1), part(whole, sequence, rank)
    of_whole = {
        "copy": lambda x: tp.copy_to_tensor_model_parallel_region(x) * (2 + rank),
        "reduce": lambda x: tp.reduce_from_tensor_model_parallel_region(x * (2 + rank)),
        "scatter": lambda x: tp.scatter_to_tensor_model_parallel_region(x * 2),
        "sum": lambda x: tp.reduce_scatter_last_dim_to_tensor_parallel_region(x, sizes),
        "part": lambda x: tp.scatter_to_sequence_parallel_region(x * 2, sequence),
        "sums": lambda x: tp.reduce_scatter_to_sequence_parallel_region(x * 2, sequence),
    }
    of_columns = {
        "gather": lambda x: tp.gather_from_tensor_model_parallel_region(x * 2, sizes),
        "use": lambda x: tp.all_gather_last_dim_from_tensor_parallel_region(x, sizes) * (2 + rank),
        "from heads": lambda x: tp.all_to_all_hp2sp(x * 2, sequence, sizes),
    }
    of_rows = {
        "parts": lambda x: tp.gather_from_sequence_parallel_region(x, True, sequence) * (2 + rank),
        "alike": lambda x: tp.gather_from_sequence_parallel_region(x, False, sequence),
        "to heads": lambda x: tp.all_to_all_sp2hp(x * 2, sequence, sizes),
    }
    compare(failures, "of the whole", of_whole, whole)
    compare(failures, "of columns", of_columns, columns)
    compare(failures, "of rows", of_rows, rows)
    return failures


@pytest.mark.slow
def test_mappings(worlds, world):
    assert_none(worlds.run(world, mappings, world))


def linears(rank, ranks):
    failures, sizes, sequence = Failures(), FEATURES[ranks], SEQUENCE[ranks]
    whole = drawn(0, LENGTH, BATCH, HIDDEN)
    own = {"sizes": sizes, "dtype": torch.float64}
    in_parts = own | {"sequence_sizes": sequence}
    of_whole = {
        "column": ColumnParallelLinear(HIDDEN, 7, **own),
        "bare": ColumnParallelLinear(HIDDEN, 7, bias=False, **own),
        "gathered": ColumnParallelLinear(HIDDEN, 7, gather_output=True, **own),
        "bias apart": ColumnParallelLinear(HIDDEN, 7, skip_bias_add=True, **own),
        "fused": ColumnParallelLinear(HIDDEN, 14, **own | {"sizes": [sizes, sizes]}),
        "row": RowParallelLinear(7, 3, input_is_parallel=False, **own),
    }
    of_rows = {
        "column": ColumnParallelLinear(HIDDEN, 7, **in_parts),
        "kept": ColumnParallelLinear(HIDDEN, 7, save="gathered", **in_parts),
        "frozen": ColumnParallelLinear(HIDDEN, 7, **in_parts).requires_grad_(False),
    }
    of_columns = {
        "row": RowParallelLinear(7, HIDDEN, **own),
        "bare": RowParallelLinear(7, HIDDEN, bias=False, **own),
        "parts": RowParallelLinear(7, 3, **in_parts),
        "parts, bias apart": RowParallelLinear(7, 3, skip_bias_add=True, **in_parts),
        "frozen": RowParallelLinear(7, 3, **in_parts).requires_grad_(False),
    }
    rows = part(whole, sequence, rank)
    compare_layers(failures, "of the whole", of_whole, leaf(whole))
    compare_layers(failures, "of rows", of_rows, rows)
    compare_layers(failures, "of columns", of_columns, part(whole, sizes, rank, -1))
    compare_layers(failures, "first", {"column": of_rows["column"]}, rows.detach())
    return failures


def test_linears(worlds, world):
    assert_none(worlds.run(world, linears, world))


def embeddings(rank, ranks):
    failures, sequence = Failures(), SEQUENCE[ranks]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (LENGTH, BATCH), generator=generator)
    shape, options = (VOCABULARY, HIDDEN), {"padding_idx": int(ids[1, 1]), "dtype": torch.float64}
    rows = options | {"sizes": CLASSES[ranks]}
    columns = options | {"sizes": FEATURES[ranks]}
    in_parts = {"sequence_sizes": sequence}
    of_ids = {
        "columns": FeatureParallelEmbedding(*shape, **columns),
        "own columns": FeatureParallelEmbedding(*shape, gather_output=False, **columns),
    }
    of_own = {}
    for method in ("auto", "masked", "indexed"):
        made = partial(VocabParallelEmbedding, *shape, method=method, **rows)
        of_ids |= {method: made(), f"{method}, parts": made(**in_parts)}
        of_own |= {method: made(input_is_parallel=True, **in_parts)}
    compare_layers(failures, "of ids", of_ids, ids)
    compare_layers(failures, "of own ids", of_own, ids.split(sequence)[rank])
    return failures


def test_embeddings(worlds, world):
    assert_none(worlds.run(world, embeddings, world))


OPTIONS = {
    "plain": {},
    "mean": {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "mean"},
    "weighted": {
        "label_smoothing": 0.2,
        "smooth_over": "wrong",
        "reduction": "sum",
        "ignore_index": 3,
        "weight": drawn(5, VOCABULARY).abs() + 0.1,
    },
}


def losses(rank, ranks):
    failures, sizes = Failures(), CLASSES[ranks]
    logits = part(drawn(0, LENGTH, BATCH, VOCABULARY), sizes, rank, -1)
    hidden = leaf(drawn(1, LENGTH, BATCH, HIDDEN))
    head, bias = (
        part(drawn(s, VOCABULARY, *of), sizes, rank) for s, of in [(2, (HIDDEN,)), (3, ())]
    )
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(VOCABULARY, (LENGTH, BATCH), generator=generator)
    of_logits, of_hidden = {}, {}
    for name, options in OPTIONS.items():
        ids = target.clone()
        ids[1, 1] = options.get("ignore_index", -100)
        fused = {("class_weight" if word == "weight" else word): v for word, v in options.items()}
        of_logits[name] = partial(vocab_parallel_cross_entropy, target=ids, sizes=sizes, **options)
        of_hidden[name] = partial(
            linear_cross_entropy, weight=head, target=ids, sizes=sizes, bias=bias, **fused
        )
    parts = {"sequence_sizes": SEQUENCE[ranks], "chunk_rows": 3}
    in_chunks = partial(linear_cross_entropy, weight=head, target=target, sizes=sizes, **parts)
    compare(failures, "of logits", of_logits, logits)
    compare(failures, "of hidden", of_hidden, hidden, [head, bias])
    rows = part(hidden, SEQUENCE[ranks], rank)
    compare(failures, "of parts", {"in chunks": in_chunks}, rows, [head])
    return failures


@pytest.mark.slow
def test_losses(worlds, world):
    assert_none(worlds.run(world, losses, world))


def attention(rank, ranks):
    failures, sequence = Failures(), SEQUENCE[ranks]
    whole, own = drawn(0, LENGTH, BATCH, 14), {"dtype": torch.float64}
    x, rows = leaf(whole), part(whole, sequence, rank)
    of_whole = {
        "14 heads": ParallelAttention(14, 14, **own),
        "groups": ParallelAttention(14, 4, num_kv_heads=2, head_dim=3, bias=True, **own),
    }
    of_rows = {
        "attention": ParallelAttention(14, 2, sequence_sizes=sequence, **own),
        "norm": sequence_parallel(torch.nn.LayerNorm(14, **own)),
        "rms": sequence_parallel(torch.nn.RMSNorm(14, **own)),
    }
    compare_layers(failures, "of the whole", of_whole, x)
    compare_layers(failures, "of rows", of_rows, rows)
    return failures


@pytest.mark.slow
def test_attention_and_norms(worlds, world):
    assert_none(worlds.run(world, attention, world))
