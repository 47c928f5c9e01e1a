"""Tensor-parallel layers under torch.compile: one graph, and the uncompiled results."""

from functools import partial

import pytest
import torch

from tests.ops.comparing import Failures
from tests.tensor_parallel import test_attention, test_linear_modules
from tests.tensor_parallel.compiling import compare, compare_layers, leaf
from tests.tensor_parallel.cross_entropy_cases import (
    ROWS,
    SPLITS,
    class_weights,
    of_hidden,
    of_logits,
    targets,
)
from tests.tensor_parallel.twins import drawn
from tests.worlds import on_ranks
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    FeatureParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    sequence_parallel,
)

# by the number of ranks: parts of a sequence, features, classes
SEQUENCE = {1: [5], 3: [4, 0, 1]}
FEATURES = {1: [7], 3: [3, 4, 0]}
CLASSES = {1: [17], 3: [1, 0, 16]}
HIDDEN, VOCABULARY, LENGTH, BATCH = 7, 17, 5, 2


def losses(ranks, pattern):
    rich = {"label_smoothing": 0.2, "z_loss": 0.01, "weight": class_weights(), "reduction": "mean"}
    other = {"label_smoothing": 0.2, "ignore_index": 3}
    sizes, target = SPLITS[ranks][0], targets(5, 2)
    known = target.masked_fill(target < 0, 3)
    return {
        "logits": of_logits(sizes, target),
        "rich": of_logits(sizes, target, **rich),
        "other": of_logits(sizes, known, **other),
        "hidden": of_hidden(sizes, target, **rich),
        "other hidden": of_hidden(sizes, known, **other),
        "of parts": of_hidden(sizes, target, ROWS[ranks]),
    }


SOURCES = {
    "linears": test_linear_modules.cases,
    "losses": losses,
    "attention": test_attention.cases,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "ranks"),
    [(source, ranks) for source in SOURCES for ranks in (1, 3)],
)
@on_ranks()
def test_functions_of_parts(rank, ranks, source):
    """Compile the cases of a test together, each with inputs of its own."""
    failures, functions, operands = Failures(), {}, {}
    for name, (fn, _, inputs, _) in SOURCES[source](ranks, "uneven").items():
        operands[name] = [leaf(layout.cut(whole, rank)) for whole, layout in inputs]
        functions[name] = lambda _, fn=fn, given=operands[name]: fn(*given)
    asked = [x for given in operands.values() for x in given]
    compare(failures, source, functions, torch.zeros(1), asked)
    return failures


def part(whole, sizes, rank, dim=0):
    return leaf(whole.split(sizes, dim)[rank])


@on_ranks(3, pytest.param(1, marks=pytest.mark.slow))
def test_modules(rank, ranks):
    """Embeddings of ids, frozen layers, norms of a sequence, and a first layer."""
    failures, sequence = Failures(), SEQUENCE[ranks]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (LENGTH, BATCH), generator=generator)
    shape, options = (VOCABULARY, HIDDEN), {"padding_idx": int(ids[1, 1]), "dtype": torch.float64}
    own, columns = options | {"sizes": CLASSES[ranks]}, options | {"sizes": FEATURES[ranks]}
    parts = {"sequence_sizes": sequence}
    made = partial(VocabParallelEmbedding, *shape, **own)
    of_ids = {"columns": FeatureParallelEmbedding(*shape, **columns)}
    of_ids |= {"all": made(), "parts": made(**parts)}
    of_ids |= {"all, by sums": made(exchange="sum"), "by sums": made(exchange="sum", **parts)}
    compare_layers(failures, "of ids", of_ids, ids)
    how = {"sizes": FEATURES[ranks], "dtype": torch.float64, **parts}
    column, row = ColumnParallelLinear(HIDDEN, 7, **how), RowParallelLinear(7, 3, **how)
    norms = {
        "layer": sequence_parallel(torch.nn.LayerNorm(HIDDEN, dtype=torch.float64)),
        "rms": sequence_parallel(torch.nn.RMSNorm(HIDDEN, dtype=torch.float64)),
    }
    whole = drawn(0, LENGTH, BATCH, HIDDEN)
    rows = whole.split(sequence)[rank]
    use = {"copy": lambda x: copy_to_tensor_model_parallel_region(x.transpose(0, 2)) * (2 + rank)}
    compare(failures, "mapping", use, leaf(whole))
    compare_layers(failures, "first", {"column": column}, rows)
    frozen = {"column": column.requires_grad_(False)}
    compare_layers(failures, "of rows", norms | frozen, leaf(rows))
    columns = leaf(whole.split(FEATURES[ranks], -1)[rank])
    compare_layers(failures, "of columns", {"row": row.requires_grad_(False)}, columns)
    return failures
