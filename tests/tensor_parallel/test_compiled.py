"""Tensor-parallel layers under torch.compile: one graph, and what they give uncompiled."""

import pytest
import torch

from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.compiling import compare, drawn, leaf
from varcomm import tensor_parallel as tp
from varcomm.models import GPT
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    FeatureParallelEmbedding,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_cross_entropy,
    parallelize,
    sequence_parallel,
    vocab_parallel_cross_entropy,
)

WORLDS = (1, 2, 3)

# by the number of ranks: parts of a sequence, features, classes
SEQUENCE = {1: [5], 2: [2, 3], 3: [4, 0, 1]}
FEATURES = {1: [7], 2: [2, 5], 3: [3, 4, 0]}
CLASSES = {1: [17], 2: [12, 5], 3: [1, 0, 16]}
HIDDEN, VOCABULARY, LENGTH, BATCH = 7, 17, 5, 2


@pytest.fixture(params=WORLDS, ids="world {}".format)
def world(request):
    return request.param


def part(whole, sizes, rank, dim=0):
    return leaf(whole.split(sizes, dim)[rank])


def mappings(rank, ranks):
    failures, sizes, sequence = Failures(), FEATURES[ranks], SEQUENCE[ranks]
    whole = leaf(drawn(0, LENGTH, BATCH, HIDDEN))
    columns, rows = part(whole, sizes, rank, -1), part(whole, sequence, rank)
    cases = {
        "copy": (lambda x: tp.copy_to_tensor_model_parallel_region(x) * (2 + rank), whole),
        "reduce": (lambda x: tp.reduce_from_tensor_model_parallel_region(x * (2 + rank)), whole),
        "scatter": (lambda x: tp.scatter_to_tensor_model_parallel_region(x * 2), whole),
        "gather": (lambda x: tp.gather_from_tensor_model_parallel_region(x * 2, sizes), columns),
        "use": (
            lambda x: tp.all_gather_last_dim_from_tensor_parallel_region(x, sizes) * (2 + rank),
            columns,
        ),
        "sum": (lambda x: tp.reduce_scatter_last_dim_to_tensor_parallel_region(x, sizes), whole),
        "part": (lambda x: tp.scatter_to_sequence_parallel_region(x * 2, sequence), whole),
        "parts": (
            lambda x: tp.gather_from_sequence_parallel_region(x, True, sequence) * (2 + rank),
            rows,
        ),
        "alike": (lambda x: tp.gather_from_sequence_parallel_region(x, False, sequence), rows),
        "sums": (lambda x: tp.reduce_scatter_to_sequence_parallel_region(x * 2, sequence), whole),
        "to heads": (lambda x: tp.all_to_all_sp2hp(x * 2, sequence, sizes), rows),
        "from heads": (lambda x: tp.all_to_all_hp2sp(x * 2, sequence, sizes), columns),
    }
    for name, (fn, x) in cases.items():
        compare(failures, name, fn, x)
    return failures


def test_mappings(worlds, world):
    assert_none(worlds.run(world, mappings, world))


def linears(rank, ranks):
    failures, sizes, sequence = Failures(), FEATURES[ranks], SEQUENCE[ranks]
    whole = drawn(0, LENGTH, BATCH, HIDDEN)
    own = {"sizes": sizes, "dtype": torch.float64}
    in_parts = own | {"sequence_sizes": sequence}
    rows = part(whole, sequence, rank)
    for name, layer, x in [
        ("column", ColumnParallelLinear(HIDDEN, 7, **own), leaf(whole)),
        ("bare", ColumnParallelLinear(HIDDEN, 7, bias=False, **own), leaf(whole)),
        ("gathered", ColumnParallelLinear(HIDDEN, 7, gather_output=True, **own), leaf(whole)),
        ("bias apart", ColumnParallelLinear(HIDDEN, 7, skip_bias_add=True, **own), leaf(whole)),
        ("fused", ColumnParallelLinear(HIDDEN, 14, **own | {"sizes": [sizes, sizes]}), leaf(whole)),
        ("of parts", ColumnParallelLinear(HIDDEN, 7, **in_parts), rows),
        ("kept", ColumnParallelLinear(HIDDEN, 7, save="gathered", **in_parts), rows),
        ("row", RowParallelLinear(7, HIDDEN, **own), part(whole, sizes, rank, -1)),
        ("row of all", RowParallelLinear(7, 3, input_is_parallel=False, **own), leaf(whole)),
        ("to parts", RowParallelLinear(7, 3, **in_parts), part(whole, sizes, rank, -1)),
        (
            "to parts, bias apart",
            RowParallelLinear(7, 3, skip_bias_add=True, **in_parts),
            part(whole, sizes, rank, -1),
        ),
    ]:
        compare(failures, name, layer, x, layer.parameters())
    frozen = ColumnParallelLinear(HIDDEN, 7, **in_parts).requires_grad_(False)
    compare(failures, "frozen", frozen, rows)
    compare(failures, "first", ColumnParallelLinear(HIDDEN, 7, **in_parts), rows.detach())
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
    own = {**in_parts, "input_is_parallel": True}
    mine = ids.split(sequence)[rank]
    cases = [
        ("columns", FeatureParallelEmbedding(*shape, **columns), ids),
        ("own columns", FeatureParallelEmbedding(*shape, gather_output=False, **columns), ids),
    ]
    for method in ("auto", "masked", "indexed"):
        cases += [
            (method, VocabParallelEmbedding(*shape, method=method, **rows), ids),
            (f"{method}, parts", VocabParallelEmbedding(*shape, method=method, **in_parts, **rows), ids),
            (f"{method}, own", VocabParallelEmbedding(*shape, method=method, **own, **rows), mine),
        ]
    for name, layer, x in cases:
        compare(failures, name, layer, x, layer.parameters())
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
    head, bias = (part(drawn(s, VOCABULARY, *of), sizes, rank) for s, of in [(2, (HIDDEN,)), (3, ())])
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(VOCABULARY, (LENGTH, BATCH), generator=generator)
    for name, options in OPTIONS.items():
        ids = target.clone()
        ids[1, 1] = options.get("ignore_index", -100)

        def of_logits(x, ids=ids, options=options):
            return vocab_parallel_cross_entropy(x * 2, ids, sizes, **options)

        fused = {("class_weight" if word == "weight" else word): v for word, v in options.items()}

        def of_hidden(x, ids=ids, options=fused):
            return linear_cross_entropy(x * 2, head, ids, sizes, bias=bias, **options)

        compare(failures, name, of_logits, logits)
        compare(failures, f"{name}, fused", of_hidden, hidden, [head, bias])

    def in_chunks(x):
        parts = {"sequence_sizes": SEQUENCE[ranks], "chunk_rows": 3}
        return linear_cross_entropy(x * 2, head, target, sizes, **parts)

    compare(failures, "in chunks", in_chunks, part(hidden, SEQUENCE[ranks], rank), [head])
    return failures


def test_losses(worlds, world):
    assert_none(worlds.run(world, losses, world))


def attention(rank, ranks):
    failures, sequence = Failures(), SEQUENCE[ranks]
    whole, own = drawn(0, LENGTH, BATCH, 14), {"dtype": torch.float64}
    x, rows = leaf(whole), part(whole, sequence, rank)
    for name, layer, given in [
        ("14 heads", ParallelAttention(14, 14, **own), x),
        ("groups", ParallelAttention(14, 4, num_kv_heads=2, head_dim=3, bias=True, **own), x),
        ("parts", ParallelAttention(14, 2, sequence_sizes=sequence, **own), rows),
        ("norm of parts", sequence_parallel(torch.nn.LayerNorm(14, **own)), rows),
    ]:
        compare(failures, name, layer, given, layer.parameters())
    return failures


def test_attention_and_norms(worlds, world):
    assert_none(worlds.run(world, attention, world))


def training(rank, ranks, sequence):
    """Losses and parameters of two steps, compiled and not."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (LENGTH + 1, BATCH), generator=generator)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = GPT(VOCABULARY, 14, num_layers=1, num_heads=7, mlp_size=5).double()
        parallelize(model, model.tensor_parallel_plan(sequence))
        loss_of = torch.compile(model.loss, fullgraph=True, backend="aot_eager") if compiled else model.loss
        optimizer, losses = torch.optim.AdamW(model.parameters(), 0.1), []
        for _ in range(2):
            loss = loss_of(text[:-1], text[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append((losses, [p.detach() for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    return len(found[1][1])


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_language_model_is_trained(worlds, world, in_parts):
    found = worlds.run(world, training, world, SEQUENCE[world] if in_parts else None)
    assert found == [8] * world
