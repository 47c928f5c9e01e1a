"""Wrong use of the layer: the type of the error, the argument it names, the ranks that raise."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import varcomm
import varcomm.tensor_parallel as tp
from varcomm import ArgumentError, DisagreementError

RANKS = 3
X, W = torch.ones(2, 4), torch.ones(3, 4)
IDS, TARGET = torch.tensor([0, 4, 2]), torch.tensor([4, 0, -100])
NORM = nn.RMSNorm(4, elementwise_affine=False)
HEADS = torch.ones(3, 2, 4)
SPLIT = [2, 3, 0]


def vocabulary(rank, ids=IDS, weight=None, **options):
    weight = torch.zeros(SPLIT[rank], 2) if weight is None else weight
    return tp.vocab_parallel_embedding(ids, weight, SPLIT, **options)


def features(rank, ids=IDS, weight=None, **options):
    weight = torch.zeros(5, SPLIT[rank]) if weight is None else weight
    return tp.feature_parallel_embedding(ids, weight, SPLIT, **options)


def of_logits(rank, **options):
    given = {"logits": torch.zeros(3, SPLIT[rank]), "target": TARGET, "sizes": SPLIT}
    return tp.vocab_parallel_cross_entropy(**(given | options))


def of_hidden(rank, **options):
    given = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(SPLIT[rank], 4),
        "target": TARGET,
        "sizes": SPLIT,
    }
    return tp.linear_cross_entropy(**(given | options))


def fused(rank, **options):
    given = {"x": torch.ones(3, 2), "weight": torch.ones(4, 2), "bias": None}
    given |= {"residual": torch.ones(1, 4), "norm": NORM, "sequence_sizes": [1, 1, 1]}
    return tp.row_linear_norm(**(given | options))


def with_main_grad(weight, value):
    weight.main_grad = value
    return tp.column_parallel_linear(X, weight)


def sparse_gradient(_):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2).to_sparse()
    tp.grad_norm([parameter])


def both_gradients(_):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = parameter.main_grad = torch.ones(2)
    parameter.main_grad = torch.ones(2)
    tp.grad_norm([parameter])


def forked(action):
    def call(_):
        action(tp.RandomStreams(7))

    return call


def in_fork(streams, action):
    with streams.fork("sharded"):
        action()


def loaded(**changes):
    def action(streams):
        state = streams.state_dict()
        sharded = {**state["sharded"], **changes}
        streams.load_state_dict({**state, "sharded": sharded})

    return forked(action)


def batched(call, *shape):
    return lambda rank: torch.func.vmap(call)(torch.ones(2, *shape))


# Every rank makes the same mistake and raises, before any communication: call, word of the message.
LOCAL = {
    # mappings
    "whole": (lambda r: tp.scatter_to_tensor_model_parallel_region(X, [1, 1, 1]), "sizes"),
    "shard": (lambda r: tp.gather_from_tensor_model_parallel_region(X, [1, 2, 0]), "sizes"),
    "number of sizes": (lambda r: tp.scatter_to_sequence_parallel_region(X, [3]), "sizes"),
    "list": (lambda r: tp.copy_to_tensor_model_parallel_region([1.0]), "tensor"),
    "bool": (lambda r: tp.reduce_from_tensor_model_parallel_region(X > 0), "bool"),
    "mapping flag": (
        lambda r: tp.gather_from_sequence_parallel_region(X, [2, 1, 0]),
        "tensor_parallel_output_grad",
    ),
    "dim": (lambda r: tp.scatter_to_tensor_model_parallel_region(X, dim=2), "dim=2"),
    "hidden": (lambda r: tp.all_to_all_sp2hp(X, [3, 3, 3], [1, 2, 0]), "sizes"),
    "columns": (lambda r: tp.split_tensor_along_last_dim(X, [1, 2]), "sizes"),
    "piece": (lambda r: tp.gather_split_1d_tensor(X), "piece"),
    # linear functions
    "column shapes": (lambda r: tp.column_parallel_linear(X, W.T), "weight"),
    "row shapes": (lambda r: tp.row_parallel_linear(X, W.T), "weight"),
    "scalar": (lambda r: tp.column_parallel_linear(torch.tensor(1.0), W), "x of shape"),
    "bias": (lambda r: tp.column_parallel_linear(X, W, torch.ones(4)), "bias"),
    "dtype": (lambda r: tp.column_parallel_linear(X.double(), W), "weight"),
    "integers": (lambda r: tp.column_parallel_linear(X.long(), W.long()), "x must be floats"),
    "no weight": (lambda r: tp.row_parallel_linear(X, None), "weight"),
    "column sizes": (lambda r: tp.column_parallel_linear(X, W, None, [2, 2, 2]), "sizes"),
    "row sizes": (lambda r: tp.row_parallel_linear(X, W, None, [2, 2, 2]), "sizes"),
    "sequence": (lambda r: tp.column_parallel_linear(X, W, sequence_sizes=[1, 1, 1]), "sequence"),
    "row sequence": (lambda r: tp.row_parallel_linear(X, W, sequence_sizes=[1, 2, 0]), "sequence"),
    "save": (lambda r: tp.column_parallel_linear(X, W, save="all"), "save"),
    "gather": (lambda r: tp.column_parallel_linear(X, W, gather_output=1), "gather_output"),
    "input": (lambda r: tp.row_parallel_linear(X, W, input_is_parallel=1), "input_is_parallel"),
    "main_grad": (lambda r: with_main_grad(W.clone().requires_grad_(), X[0]), "main_grad"),
    "leaf": (lambda r: with_main_grad(2 * W.clone().requires_grad_(), W.clone()), "main_grad"),
    # embeddings
    "large": (lambda r: vocabulary(r, IDS + 1), "ids span 1...5"),
    "negative": (lambda r: vocabulary(r, IDS - 1, method="indexed"), "ids span -1...3"),
    "large own": (lambda r: vocabulary(r, IDS + 1, input_is_parallel=True), "ids span"),
    "floats": (lambda r: vocabulary(r, IDS.float()), "ids"),
    "no ids": (lambda r: vocabulary(r, [0]), "ids"),
    "device": (lambda r: vocabulary(r, IDS.to("meta")), "ids"),
    "table": (lambda r: vocabulary(r, weight=torch.zeros(1, 2, 2)), "weight"),
    "table shard": (lambda r: vocabulary(r, weight=torch.zeros(5, 2)), "sizes"),
    "method": (lambda r: vocabulary(r, method="fast"), "method"),
    "own": (lambda r: vocabulary(r, input_is_parallel=1), "input_is_parallel"),
    "padding": (lambda r: vocabulary(r, padding_idx=5), "padding_idx"),
    "parts": (lambda r: vocabulary(r, sequence_sizes=[1, 1, 0]), "sequence_sizes"),
    "scalar id": (lambda r: vocabulary(r, IDS[0], sequence_sizes=[1, 0, 0]), "dim=0"),
    "feature ids": (lambda r: features(r, IDS + 1), "ids span"),
    "feature gather": (lambda r: features(r, gather_output=None), "gather_output"),
    # losses
    "class sizes": (lambda r: of_logits(r, sizes=[2, 3, 0, 1]), "sizes"),
    "no class": (lambda r: of_logits(r, target=torch.tensor([0, 5, 1])), "target[1]"),
    "ignored": (lambda r: of_hidden(r, ignore_index=3), "target[2]"),
    "int32": (lambda r: of_logits(r, target=TARGET.int()), "target"),
    "distribution": (lambda r: of_logits(r, target=torch.ones(3, 5)), "target"),
    "smoothing": (lambda r: of_logits(r, label_smoothing=1.0), "label_smoothing"),
    "nan smoothing": (lambda r: of_hidden(r, label_smoothing=math.nan), "label_smoothing"),
    "z": (lambda r: of_logits(r, z_loss=math.inf), "z_loss"),
    "index": (lambda r: of_logits(r, ignore_index=-100.0), "ignore_index"),
    "reduction": (lambda r: of_hidden(r, reduction="avg"), "reduction"),
    "smooth_over": (lambda r: of_hidden(r, smooth_over="none"), "smooth_over"),
    "weights": (lambda r: of_logits(r, weight=torch.ones(2)), "weight"),
    "weights with gradient": (
        lambda r: of_hidden(r, class_weight=torch.ones(5, requires_grad=True)),
        "class_weight",
    ),
    "logits": (lambda r: of_logits(r, logits=torch.ones(3, 5)), "logits"),
    "int logits": (lambda r: of_logits(r, logits=torch.ones(3, SPLIT[r]).long()), "logits"),
    "scalar logits": (lambda r: of_logits(r, logits=torch.tensor(1.0)), "logits"),
    "no classes": (
        lambda r: of_logits(r, logits=torch.ones(3, 0), sizes=[0, 0, 0]),
        "no classes",
    ),
    "one class": (
        lambda r: of_logits(
            r,
            logits=torch.ones(3, int(r == 0)),
            target=TARGET * 0,
            sizes=[1, 0, 0],
            label_smoothing=0.1,
            smooth_over="wrong",
        ),
        "wrong one",
    ),
    "head": (lambda r: of_hidden(r, hidden=torch.ones(3, 5)), "weight"),
    "head dtype": (lambda r: of_hidden(r, hidden=torch.ones(3, 4).double()), "weight"),
    "head bias": (lambda r: of_hidden(r, bias=torch.ones(5)), "bias"),
    "chunk": (lambda r: of_hidden(r, chunk_rows=0), "chunk_rows"),
    "hidden parts": (lambda r: of_hidden(r, sequence_sizes=[1, 1, 1]), "sequence_sizes"),
    # attention
    "no value": (lambda r: tp.attention(HEADS, HEADS, None), "value"),
    "query": (lambda r: tp.attention(HEADS[0], HEADS, HEADS), "query"),
    "dtypes": (lambda r: tp.attention(HEADS, HEADS, HEADS.double()), "dtype"),
    "causal": (lambda r: tp.attention(HEADS, HEADS, HEADS, 1), "causal"),
    "no heads of keys": (lambda r: tp.attention(HEADS, HEADS[:, :0], HEADS[:, :0]), "heads"),
    "places": (lambda r: tp.attention(HEADS[:2], HEADS, HEADS), "places"),
    "scale": (lambda r: tp.attention(HEADS, HEADS, HEADS, scale=math.inf), "scale"),
    "head_dim": (lambda r: tp.split_heads(HEADS, 3), "qkv"),
    "no head_dim": (lambda r: tp.split_heads(HEADS, 0), "head_dim"),
    "attention input": (lambda r: tp.ParallelAttention(4, 2)(torch.ones(4)), "x must be"),
    # inference
    "norm": (lambda r: tp.norm_column_linear(X, nn.BatchNorm1d(4), W), "norm"),
    "norm shape": (lambda r: tp.norm_column_linear(X, nn.RMSNorm((2, 4)), W), "norm"),
    "norm device": (lambda r: tp.norm_column_linear(X, nn.RMSNorm(4, device="meta"), W), "norm"),
    "buffers": (lambda r: tp.norm_column_linear(X, NORM, W, buffers={}), "buffers"),
    "needs gradient": (lambda r: tp.norm_column_linear(X, NORM, nn.Parameter(W)), "weight"),
    "residual": (lambda r: fused(r, residual=X), "residual"),
    "no residual": (lambda r: fused(r, residual=None), "residual"),
    "fused sequence": (lambda r: fused(r, sequence_sizes=None), "sequence_sizes"),
    "fused gather": (lambda r: fused(r, gather=1), "gather"),
    # gradients
    "order": (lambda r: tp.grad_norm([], 0), "norm_type"),
    "limit": (lambda r: tp.clip_grad_norm_([], -1.0), "max_norm"),
    "named": (lambda r: tp.grad_norm([("weight", X)]), "parameter 0"),
    "nonfinite": (lambda r: tp.grad_norm([], error_if_nonfinite=1), "error_if_nonfinite"),
    "sparse": (sparse_gradient, "gradient of parameter 0"),
    "two gradients": (both_gradients, "main_grad"),
    # streams and checkpoints
    "stream": (forked(lambda s: s.fork("other").__enter__()), "other"),
    "nested": (forked(lambda s: in_fork(s, s.fork("sharded").__enter__)), "sharded"),
    "saved inside": (forked(lambda s: in_fork(s, s.state_dict)), "state_dict"),
    "loaded inside": (forked(lambda s: in_fork(s, lambda: s.load_state_dict({}))), "load_state"),
    "other streams": (forked(lambda s: s.load_state_dict({})), "streams"),
    "other seed": (loaded(seed=torch.tensor(1)), "sharded"),
    "no state": (loaded(cpu=3), "cpu"),
    "no kind": (loaded(tpu=torch.zeros(16, dtype=torch.uint8)), "tpu"),
    "wrong state": (loaded(cpu=torch.zeros(16, dtype=torch.uint8)), "CPU"),
    "name": (forked(lambda s: s.add(3)), "name"),
    "stream again": (forked(lambda s: s.add("sharded")), "sharded"),
    "coordinate": (forked(lambda s: s.add("expert", expert=0.5)), "expert"),
    "distribute": (
        lambda r: tp.checkpoint(torch.exp, X, distribute_saved_activations=1),
        "distribute_saved_activations",
    ),
    "distribute what": (
        lambda r: tp.checkpoint(torch.exp, 3, distribute_saved_activations=True),
        "first argument",
    ),
    "no block": (lambda r: tp.CheckpointWithoutOutput().checkpoint(torch.exp, X), "block"),
    # vmap over layers that communicate
    "vmap of a linear": (batched(lambda x: tp.column_parallel_linear(x, W), 2, 4), "vmap"),
    "vmap of a row": (batched(lambda x: tp.row_parallel_linear(x, W), 2, 4), "vmap"),
}


def faults(cases):
    """Return the cases that raise another error than the right one, by their names."""
    wrong = {}
    for name, call, kind, word in cases:
        try:
            call()
            wrong[name] = "no error"
        except Exception as error:
            if type(error) is not kind or word not in str(error):
                wrong[name] = f"{type(error).__name__}: {error}"
    return wrong


def refused(rank):
    wrong = faults((n, partial(call, rank), ArgumentError, w) for n, (call, w) in LOCAL.items())
    return wrong, varcomm.all_reduce(torch.ones(())).item()


def test_wrong_arguments(worlds):
    assert worlds.run(RANKS, refused) == [({}, 3.0)] * RANKS


def model():
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))


def hooked(module):
    module.register_forward_hook(lambda module, given, result: 2 * result)
    return module


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    made = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    made[1].weight = made[0].weight
    return made


def changed_norm():
    return tp.sequence_parallel(nn.LayerNorm(4))


def layer_of(kind, *args, **options):
    return lambda wrong: kind(*(args if wrong else args[:2]), **(options if wrong else {}))


def broadcast(wrong, keys=("a",), dtype=torch.float32, data=None):
    good = {"a": torch.zeros(2)}
    if wrong:
        return tp.broadcast_data(keys, good if data is None else data, dtype)
    return tp.broadcast_data(["a"], good, torch.float32)


def parallelized(plan, make=model):
    return lambda wrong: tp.parallelize(make(), plan if wrong else {"0": _unchanged})


def _unchanged(module):
    return module


COLUMN, ROW = tp.ColumnParallelLinear, tp.RowParallelLinear
VOCAB, FEATURE = tp.VocabParallelEmbedding, tp.FeatureParallelEmbedding
GPT2 = nn.Embedding.from_pretrained(torch.zeros(5, 2))

# One rank calls with ``wrong=True`` and all ranks raise: call, type, word of the message.
SHARED = {
    "bias flag": (layer_of(COLUMN, 6, 7, bias=1), ArgumentError, "bias"),
    "features": (lambda w: COLUMN(6, 5.5 if w else 5), ArgumentError, "out_features"),
    "negative": (lambda w: ROW(-1 if w else 6, 5), ArgumentError, "in_features"),
    "sum": (layer_of(ROW, 6, 7, sizes=[3, 5, 0]), ArgumentError, "sizes"),
    "blocks": (layer_of(COLUMN, 6, 7, sizes=[[3, 0, 0], [5, 0, 0]]), ArgumentError, "sizes"),
    "number": (layer_of(COLUMN, 6, 7, sizes=[3, 4]), ArgumentError, "sizes"),
    "sequence": (layer_of(ROW, 6, 7, sequence_sizes=[3]), ArgumentError, "sequence_sizes"),
    "init": (layer_of(COLUMN, 6, 7, init=3), ArgumentError, "init"),
    "dtype": (layer_of(COLUMN, 6, 7, dtype=torch.int64), ArgumentError, "dtype"),
    "device": (layer_of(COLUMN, 6, 7, device="gpu"), ArgumentError, "gpu"),
    "save": (layer_of(COLUMN, 6, 7, save="all"), ArgumentError, "save"),
    "parallel": (layer_of(ROW, 6, 7, input_is_parallel=2), ArgumentError, "input_is_parallel"),
    "other sizes": (layer_of(COLUMN, 6, 7, sizes=[7, 0, 0]), DisagreementError, "sizes"),
    "other dtype": (layer_of(ROW, 6, 7, dtype=torch.float64), DisagreementError, "dtype"),
    "other option": (layer_of(ROW, 6, 7, use_fp32=False), DisagreementError, "use_fp32"),
    "not a linear": (
        lambda w: COLUMN.from_linear(nn.Identity() if w else nn.Linear(6, 7)),
        ArgumentError,
        "Identity",
    ),
    "own forward": (
        lambda w: ROW.from_linear(Doubled(6, 7) if w else nn.Linear(6, 7)),
        ArgumentError,
        "forward",
    ),
    "option": (
        lambda w: COLUMN.from_linear(nn.Linear(6, 7), **({"stride": 1} if w else {})),
        ArgumentError,
        "stride",
    ),
    "other weights": (
        lambda w: COLUMN.from_linear(_linear(w)),
        DisagreementError,
        "weight",
    ),
    "no weight": (
        lambda w: (COLUMN(6, 7, allocate_weight=False)).to_linear(),
        ArgumentError,
        "allocate_weight",
    ),
    "table sizes": (layer_of(VOCAB, 5, 2, sizes=[3, 3, 0]), ArgumentError, "sizes"),
    "table blocks": (layer_of(VOCAB, 5, 2, sizes=[[2, 0, 0], [3, 0, 0]]), ArgumentError, "sizes"),
    "table width": (lambda w: FEATURE(5, 2.0 if w else 2), ArgumentError, "embedding_dim"),
    "max_norm": (layer_of(FEATURE, 5, 2, max_norm=1.0), ArgumentError, "max_norm"),
    "table padding": (layer_of(VOCAB, 5, 2, padding_idx=5), ArgumentError, "padding_idx"),
    "table method": (layer_of(VOCAB, 5, 2, method="x"), ArgumentError, "method"),
    "table parts": (layer_of(VOCAB, 5, 2, sequence_sizes=[1]), ArgumentError, "sequence_sizes"),
    "table gather": (layer_of(FEATURE, 5, 2, gather_output=0), ArgumentError, "gather_output"),
    "table init": (layer_of(VOCAB, 5, 2, init=nn.init.zeros_), DisagreementError, "init"),
    "other method": (layer_of(VOCAB, 5, 2, method="masked"), DisagreementError, "method"),
    "not an embedding": (
        lambda w: VOCAB.from_embedding(nn.Linear(2, 5) if w else GPT2),
        ArgumentError,
        "embedding",
    ),
    "hooks": (
        lambda w: FEATURE.from_embedding(hooked(nn.Embedding(5, 2)) if w else GPT2),
        ArgumentError,
        "hooks",
    ),
    "sparse table": (
        lambda w: VOCAB.from_embedding(nn.Embedding(5, 2, sparse=True) if w else GPT2),
        ArgumentError,
        "sparse",
    ),
    "other table": (
        lambda w: VOCAB.from_embedding(nn.Embedding(5, 2) if w else GPT2),
        DisagreementError,
        "weight",
    ),
    "heads": (lambda w: tp.ParallelAttention(4, 2.0 if w else 2), ArgumentError, "num_heads"),
    "groups": (lambda w: tp.ParallelAttention(4, 4, 3 if w else 4), ArgumentError, "num_kv_heads"),
    "width": (lambda w: tp.ParallelAttention(4, 3 if w else 2), ArgumentError, "head_dim"),
    "kv sizes": (
        lambda w: tp.ParallelAttention(4, 2, sizes=[1, 2, 0] if w else None),
        ArgumentError,
        "sizes",
    ),
    "other heads": (lambda w: tp.ParallelAttention(4, 4 if w else 2), DisagreementError, "heads"),
    "no module": (lambda w: tp.parallelize(None if w else model(), {}), ArgumentError, "module"),
    "no plan": (parallelized(["0"]), ArgumentError, "plan"),
    "style": (parallelized({"0": "colum"}), ArgumentError, "plan['0']"),
    "no match": (parallelized({"5": "column"}), ArgumentError, "plan['5']"),
    "two patterns": (parallelized({"0": "column", "[0]": "row"}), ArgumentError, "both match"),
    "inside": (parallelized({"": _unchanged, "0": "column"}), ArgumentError, "contains"),
    "other plan": (parallelized({"0": "column"}), DisagreementError, "modules"),
    "raising plan": (parallelized({"0": lambda m: 1 // 0}), ArgumentError, "zero"),
    "no result": (parallelized({"0": lambda m: None}), ArgumentError, "NoneType"),
    "no norm": (
        lambda w: tp.sequence_parallel(None if w else nn.LayerNorm(4)),
        ArgumentError,
        "module",
    ),
    "other norm": (
        lambda w: tp.sequence_parallel(nn.LayerNorm(4, bias=not w)),
        DisagreementError,
        "bias",
    ),
    "seed": (lambda w: tp.RandomStreams(0.5 if w else 7), ArgumentError, "seed"),
    "other seed": (lambda w: tp.RandomStreams(8 if w else 7), DisagreementError, "seed"),
    "other coordinates": (
        lambda w: tp.RandomStreams(7, data=int(w)),
        DisagreementError,
        "coordinates",
    ),
    "string of keys": (lambda w: broadcast(w, "a"), ArgumentError, "keys"),
    "same keys": (lambda w: broadcast(w, ["a", "a"]), ArgumentError, "keys"),
    "data dtype": (lambda w: broadcast(w, dtype="float32"), ArgumentError, "dtype"),
    "other data dtype": (lambda w: broadcast(w, dtype=torch.int64), DisagreementError, "dtype"),
}

# The same for the first rank, the only one that passes data.
OF_FIRST = {
    "no data": (lambda w: broadcast(w, data=3), "data"),
    "missing": (lambda w: broadcast(w, data={"b": X}), "'a'"),
    "data dtype": (lambda w: broadcast(w, data={"a": X.double()}), "dtype"),
    "sparse data": (lambda w: broadcast(w, data={"a": X.to_sparse()}), "data['a']"),
    "meta data": (lambda w: broadcast(w, data={"a": X.to("meta")}), "meta"),
    "two devices": (
        lambda w: broadcast(w, ["a", "b"], data={"a": X, "b": X.to("meta")}),
        "device",
    ),
    "logits": (
        lambda w: tp.vocab_parallel_cross_entropy(None if w else X, torch.zeros(2).long()),
        "which asks for sizes",
    ),
}


def _linear(wrong):
    linear = nn.Linear(6, 7)
    nn.init.constant_(linear.weight, float(wrong))
    return linear


def alike(call, wrong):
    torch.manual_seed(0)
    call(wrong)


def shared(rank):
    cases = [(name, partial(alike, call, rank == 1), *of) for name, (call, *of) in SHARED.items()]
    cases += [
        (name, partial(alike, call, rank == 0), ArgumentError, word)
        for name, (call, word) in OF_FIRST.items()
    ]
    return faults(cases), varcomm.all_reduce(torch.ones(())).item()


def test_an_error_of_one_rank_is_an_error_of_all(worlds):
    assert worlds.run(RANKS, shared) == [({}, 3.0)] * RANKS


def group_of(rank):
    groups = [torch.distributed.new_group([r]) for r in range(RANKS)]
    parameter = varcomm.sharding.mark(
        nn.Parameter(torch.ones(2)), varcomm.sharding.ShardSpec.of([2], 0, groups[rank])
    )
    with pytest.raises(ArgumentError, match="another group"):
        tp.grad_norm([parameter])
    return True


def test_a_norm_over_another_group(worlds):
    assert worlds.run(RANKS, group_of) == [True] * RANKS


# Inside debug(), ranks that differ all raise: call, word of the message.
DIFFERENT = {
    "ids": (lambda r: vocabulary(r, IDS + (r == 1)), "ids"),
    "padding": (lambda r: vocabulary(r, padding_idx=r), "padding_idx"),
    "method": (lambda r: vocabulary(r, method=("masked", "indexed", "auto")[r]), "method"),
    "parts": (lambda r: vocabulary(r, sequence_sizes=[r, 2 - r, 1]), "sequence_sizes"),
    "features": (lambda r: features(r, IDS.flip(0) if r else IDS), "ids"),
    "targets": (lambda r: of_logits(r, target=torch.tensor([r, 0, 1])), "values of target"),
    "options": (lambda r: of_logits(r, label_smoothing=0.1 * r), "options"),
    "class weights": (lambda r: of_logits(r, weight=None if r else torch.ones(5)), "weights"),
    "wrong head": (
        lambda r: of_hidden(r, weight=torch.zeros(SPLIT[r], 4 + (r == 1))),
        "weight",
    ),
    "sequence": (
        lambda r: tp.column_parallel_linear(X[:1], W, sequence_sizes=[1, 1, 1 + r]),
        "sizes",
    ),
    "wrong weight": (lambda r: tp.row_parallel_linear(X, W if r == 0 else W.T), "weight"),
    "wrong rotary": (
        lambda r: tp.ParallelAttention(4, 3, head_dim=4)(
            torch.ones(3, 4), lambda x: x if r == 0 else x[:2]
        ),
        "query",
    ),
    "max_norm": (lambda r: tp.clip_grad_norm_([], 1.0 + r), "max_norm"),
    "norm_type": (lambda r: tp.grad_norm([], 1.0 + r), "norm_type"),
}


def differing(rank):
    with varcomm.debug():
        return faults(
            (name, partial(call, rank), DisagreementError, word)
            for name, (call, word) in DIFFERENT.items()
        )


def test_differences_inside_debug(worlds):
    assert worlds.run(RANKS, differing) == [{}] * RANKS
