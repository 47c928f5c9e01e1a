"""Wrong use of the layer: the type of the error, the argument it names, the ranks that raise."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import varcomm
import varcomm.tensor_parallel as tp
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.tensor_parallel.init import drawing

RANKS = 3
X, W = torch.ones(2, 4), torch.ones(3, 4)
IDS, TARGET = torch.tensor([0, 4, 2]), torch.tensor([4, 0, -100])
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


def norm_of(gradient):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = gradient
    return tp.grad_norm([parameter])


def forked(action):
    return lambda _: action(tp.RandomStreams(7))


def in_fork(streams, action):
    with streams.fork("sharded"):
        action()


def loaded(**changes):
    def action(streams):
        state = streams.state_dict()
        streams.load_state_dict({**state, "sharded": state["sharded"] | changes})

    return forked(action)


def batched(call):
    return lambda _: torch.func.vmap(lambda x: call(x, W))(torch.ones(2, 2, 4))


# Every rank makes the same mistake and raises, before any communication: call, word of the message.
LOCAL = [
    # mappings
    (lambda r: tp.scatter_to_tensor_model_parallel_region(X, [1, 1, 1]), "sizes"),
    (lambda r: tp.gather_from_tensor_model_parallel_region(X, [1, 2, 0]), "sizes"),
    (lambda r: tp.copy_to_tensor_model_parallel_region([1.0]), "tensor"),
    (lambda r: tp.reduce_from_tensor_model_parallel_region(X > 0), "bool"),
    (lambda r: tp.gather_from_sequence_parallel_region(X, [2]), "tensor_parallel_output_grad"),
    (lambda r: tp.scatter_to_tensor_model_parallel_region(X, dim=2), "dim=2"),
    (lambda r: tp.gather_split_1d_tensor([1.0]), "piece"),
    # mappings that are primitives say which one was called
    *(
        (lambda r, f=f: getattr(tp, f)(X, sizes=[3, 3, 3]), f"{f} on")
        for f in (
            "gather_from_sequence_parallel_region",
            "reduce_scatter_to_sequence_parallel_region",
            "all_gather_last_dim_from_tensor_parallel_region",
            "reduce_scatter_last_dim_to_tensor_parallel_region",
        )
    ),
    (lambda r: tp.all_to_all(X, [1, 1, 1], [1, 1, 1]), "all_to_all on"),
    (lambda r: tp.all_to_all_sp2hp(X, [2, 2, 2], [1, 1, 1]), "all_to_all_sp2hp on"),
    (lambda r: tp.all_to_all_hp2sp(X[0], [1, 1, 2], [4, 4, 4]), "all_to_all_hp2sp on"),
    (lambda r: tp.gather_from_sequence_parallel_region(X, sizes=tp), "group=..."),
    # linear functions
    (lambda r: tp.column_parallel_linear(X, W.T), "weight"),
    (lambda r: tp.column_parallel_linear(torch.tensor(1.0), W), "x must be"),
    (lambda r: tp.column_parallel_linear(X, W, torch.ones(4)), "bias"),
    (lambda r: tp.column_parallel_linear(X.double(), W), "weight"),
    (lambda r: tp.column_parallel_linear(X.long(), W.long()), "x must be floats"),
    (lambda r: tp.column_parallel_linear(X, W, sequence_sizes=[1, 1, 1]), "sequence"),
    (lambda r: tp.row_parallel_linear(X, W, sequence_sizes=[1, 2, 0]), "sequence"),
    (lambda r: tp.column_parallel_linear(X, W, save="all"), "save"),
    (lambda r: tp.row_parallel_linear(X, W, use_fp32=1), "use_fp32"),
    (batched(tp.column_parallel_linear), "vmap"),
    (batched(tp.row_parallel_linear), "vmap"),
    # embeddings
    (lambda r: vocabulary(r, IDS + 1), "ids span 1...5"),
    (lambda r: vocabulary(r, IDS - 1, exchange="sum"), "ids span -1...3"),
    (lambda r: vocabulary(r, IDS + 1, exchange="sum", sequence_sizes=[0, 1, 2]), "ids span"),
    (lambda r: vocabulary(r, exchange="all"), "exchange"),
    (lambda r: features(r, IDS - 1), "ids span -1...3"),
    (lambda r: vocabulary(r, IDS.float()), "ids"),
    (lambda r: vocabulary(r, IDS.to("meta")), "ids"),
    (lambda r: vocabulary(r, weight=torch.zeros(5, 2)), "sizes"),
    (lambda r: vocabulary(r, padding_idx=5), "padding_idx"),
    (lambda r: vocabulary(r, sequence_sizes=[1, 1, 0]), "sequence_sizes"),
    (lambda r: vocabulary(r, IDS[0], sequence_sizes=[1, 0, 0]), "dim=0"),
    (lambda r: features(r, padding_idx=-6), "padding_idx"),
    # losses
    (lambda r: of_logits(r, sizes=[2, 3, 0, 1]), "sizes"),
    (lambda r: of_logits(r, target=torch.tensor([0, 5, 1])), "target[1]"),
    (lambda r: of_hidden(r, ignore_index=3), "target[2]"),
    (lambda r: of_logits(r, target=TARGET.int()), "target"),
    (lambda r: of_logits(r, label_smoothing=1.0), "label_smoothing"),
    (lambda r: of_logits(r, z_loss=math.inf), "z_loss"),
    (lambda r: of_logits(r, ignore_index=-100.0), "ignore_index"),
    (lambda r: of_hidden(r, reduction="avg"), "reduction"),
    (lambda r: of_logits(r, weight=torch.ones(2)), "weight"),
    (lambda r: of_hidden(r, class_weight=torch.ones(5, requires_grad=True)), "class_weight"),
    (lambda r: of_logits(r, logits=torch.ones(3, 5)), "sizes"),
    (lambda r: of_logits(r, logits=torch.ones(3, SPLIT[r]).long()), "logits"),
    (lambda r: of_logits(r, logits=torch.tensor(1.0)), "logits"),
    (lambda r: of_logits(r, logits=torch.ones(3, 0), sizes=[0, 0, 0]), "no classes"),
    (lambda r: of_hidden(r, hidden=torch.ones(3, 5)), "weight"),
    (lambda r: of_hidden(r, bias=torch.ones(5)), "bias"),
    (lambda r: of_hidden(r, sequence_sizes=[1, 1, 1]), "sequence_sizes"),
    # attention
    (lambda r: tp.attention(HEADS, HEADS, None), "value"),
    (lambda r: tp.attention(HEADS[0], HEADS, HEADS), "query"),
    (lambda r: tp.attention(HEADS, HEADS, HEADS.double()), "dtype"),
    (lambda r: tp.attention(HEADS, HEADS, HEADS, 1), "causal"),
    (lambda r: tp.attention(HEADS, HEADS[:, :0], HEADS[:, :0]), "heads"),
    (lambda r: tp.split_heads(HEADS, 3), "qkv"),
    (lambda r: tp.split_heads(HEADS, 0), "head_dim"),
    (lambda r: tp.ParallelAttention(4, 2)(torch.ones(4)), "query"),
    # gradients
    (lambda r: tp.grad_norm([], 0), "norm_type"),
    (lambda r: tp.clip_grad_norm_([], -1.0), "max_norm"),
    (lambda r: tp.grad_norm([("weight", X)]), "parameter 0"),
    (lambda r: tp.grad_norm([], error_if_nonfinite=1), "error_if_nonfinite"),
    (lambda r: norm_of(torch.ones(2).to_sparse()), "gradient of parameter 0"),
    # streams and checkpoints
    (forked(lambda s: s.fork("other").__enter__()), "other"),
    (forked(lambda s: in_fork(s, s.fork("sharded").__enter__)), "sharded"),
    (forked(lambda s: in_fork(s, s.state_dict)), "state_dict"),
    (forked(lambda s: in_fork(s, lambda: s.load_state_dict({}))), "load_state"),
    (forked(lambda s: s.load_state_dict({})), "streams"),
    (loaded(seed=torch.tensor(1)), "sharded"),
    (loaded(tpu=torch.zeros(16, dtype=torch.uint8)), "device"),
    (forked(lambda s: s.add(3)), "name"),
    (forked(lambda s: s.add("sharded")), "sharded"),
    (forked(lambda s: s.add("expert", expert=0.5)), "expert"),
    (
        lambda r: tp.CheckpointWithoutOutput().discard_output_and_register_recompute(X),
        "checkpoint() begins",
    ),
    (lambda r: tp.checkpoint(torch.exp, False, X), "distribute_saved_activations"),
]


def faults(cases):
    """Return the cases that raise another error than the right one, by number and word."""
    wrong = {}
    for number, (call, kind, word) in enumerate(cases):
        torch.manual_seed(0)
        try:
            call()
            wrong[number, word] = "no error"
        except Exception as error:
            if type(error) is not kind or word not in str(error):
                wrong[number, word] = f"{type(error).__name__}: {error}"
    return wrong


@on_ranks(RANKS)
def test_wrong_arguments(rank):
    wrong = faults((partial(call, rank), ArgumentError, word) for call, word in LOCAL)
    assert not wrong
    assert varcomm.all_reduce(torch.ones(())).item() == 3.0


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def model():
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))


def hooked():
    module = nn.Embedding(5, 2)
    module.register_forward_hook(lambda module, given, result: 2 * result)
    return module


def with_forward():
    module = nn.Linear(6, 7)
    module.forward = lambda x: x
    return module


def constant(value):
    linear = nn.Linear(6, 7)
    for parameter in linear.parameters():
        nn.init.constant_(parameter, value)
    return linear


def layer_of(kind, *args, **options):
    return lambda wrong: kind(*args, **(options if wrong else {}))


def instead(call, good, bad):
    return lambda wrong: call(bad if wrong else good)


def broadcast(keys=("a",), dtype=torch.float32, **data):
    given = {"a": torch.zeros(2)} | data
    calls = {True: (keys, given, dtype), False: (["a"], {"a": torch.zeros(2)}, torch.float32)}
    return lambda wrong: tp.broadcast_data(*calls[wrong])


def parallelized(plan):
    return lambda wrong: tp.parallelize(model(), plan if wrong else {"0": lambda module: module})


COLUMN, ROW = tp.ColumnParallelLinear, tp.RowParallelLinear
VOCAB, FEATURE = tp.VocabParallelEmbedding, tp.FeatureParallelEmbedding
HEADED = tp.ParallelAttention
TABLE, LINEAR = nn.Embedding.from_pretrained(torch.zeros(5, 2)), constant(0.0)
BLOCKS = [[3, 0, 0], [5, 0, 0]]

# One rank calls with ``wrong=True`` and all ranks raise: call, word of the message.
SHARED = {
    ArgumentError: [
        (layer_of(COLUMN, 6, 7, bias=1), "bias"),
        (instead(lambda n: COLUMN(6, n), 5, 5.5), "out_features"),
        (layer_of(ROW, 6, 7, sizes=[3, 5, 0]), "sizes"),
        (layer_of(COLUMN, 6, 7, sizes=BLOCKS), "sizes"),
        (layer_of(COLUMN, 6, 7, sizes=[3, 4]), "sizes"),
        (layer_of(COLUMN, 6, 7, init=3), "init"),
        (layer_of(COLUMN, 6, 7, init=nn.init.xavier_normal_), "xavier_normal_ needs the shape"),
        (layer_of(VOCAB, 5, 2, init=partial(nn.init.orthogonal_, gain=2)), "orthogonal_ needs"),
        (layer_of(COLUMN, 6, 7, init=lambda w: nn.init.kaiming_normal_(w)), "needs the shape"),
        (layer_of(COLUMN, 6, 7, dtype=torch.int64), "dtype"),
        (layer_of(COLUMN, 6, 7, device="gpu"), "gpu"),
        (layer_of(COLUMN, 6, 7, save="all"), "save"),
        (layer_of(COLUMN, 6, 7, stride=1), "stride"),
        (layer_of(ROW, 6, 7, input_is_parallel=2), "input_is_parallel"),
        (instead(COLUMN.from_linear, LINEAR, nn.Identity()), "Identity"),
        (instead(ROW.from_linear, LINEAR, Doubled(6, 7)), "forward"),
        (lambda w: ROW.from_linear(with_forward() if w else LINEAR), "forward"),
        (
            lambda w: tp.sequence_parallel(with_forward() if w else nn.LayerNorm(4)),
            "forward was set",
        ),
        (lambda w: COLUMN.from_linear(LINEAR, **({"stride": 1} if w else {})), "stride"),
        (layer_of(VOCAB, 5, 2, sizes=[3, 3, 0]), "sizes"),
        (layer_of(VOCAB, 5, 2, sizes=[[2, 0, 0], [3, 0, 0]]), "sizes"),
        (instead(lambda n: FEATURE(5, n), 2, 2.0), "embedding_dim"),
        (layer_of(VOCAB, 5, 2, padding_idx=5), "padding_idx"),
        (layer_of(VOCAB, 5, 2, exchange=True), "exchange"),
        (layer_of(COLUMN, 6, 7, gather_output=0), "gather_output"),
        (instead(VOCAB.from_embedding, TABLE, nn.Linear(2, 5)), "embedding"),
        (instead(FEATURE.from_embedding, TABLE, hooked()), "hooks"),
        (instead(VOCAB.from_embedding, TABLE, nn.Embedding(5, 2, sparse=True)), "sparse"),
        (instead(lambda n: HEADED(4, n), 2, 2.0), "num_heads"),
        (instead(lambda n: HEADED(4, 4, n), 4, 3), "num_kv_heads"),
        (instead(lambda n: HEADED(4, n), 2, 3), "head_dim"),
        (lambda w: tp.parallelize(None if w else model(), {}), "module"),
        (parallelized(["0"]), "plan"),
        (parallelized({"0": "colum"}), "plan['0']"),
        (parallelized({"5": "column"}), "plan['5']"),
        (parallelized({"0": "column", "[0]": "row"}), "both match"),
        (parallelized({"": lambda module: module, "0": "column"}), "contains"),
        (parallelized({"0": lambda module: 1 // 0}), "zero"),
        (lambda w: tp.sequence_parallel(None if w else nn.LayerNorm(4)), "module"),
        (instead(tp.RandomStreams, 7, 0.5), "seed"),
        (broadcast("a"), "keys"),
        (broadcast(dtype="float32"), "dtype"),
    ],
    DisagreementError: [
        (layer_of(COLUMN, 6, 7, sizes=[7, 0, 0]), "sizes"),
        (layer_of(ROW, 6, 7, dtype=torch.float64), "dtype"),
        (layer_of(ROW, 6, 7, use_fp32=False), "use_fp32"),
        (instead(COLUMN.from_linear, LINEAR, constant(1.0)), "weight"),
        (layer_of(VOCAB, 5, 2, init=nn.init.zeros_), "init"),
        (layer_of(VOCAB, 5, 2, exchange="sum"), "exchange"),
        (instead(VOCAB.from_embedding, TABLE, nn.Embedding(5, 2)), "weight"),
        (instead(lambda n: HEADED(4, n), 2, 4), "heads"),
        (parallelized({"0": "column"}), "modules"),
        (lambda w: tp.sequence_parallel(nn.LayerNorm(4, bias=not w)), "bias"),
        (instead(tp.RandomStreams, 7, 8), "seed"),
        (lambda w: tp.RandomStreams(7, data=int(w)), "data"),
        (broadcast(dtype=torch.int64), "dtype"),
    ],
}

# The same for the first rank, the only one whose data count.
OF_FIRST = [
    (instead(lambda data: tp.broadcast_data(["a"], data, X.dtype), {"a": X}, 3), "data"),
    (broadcast(["b"]), "'b'"),
    (broadcast(a=X.double()), "dtype"),
    (broadcast(a=X.to_sparse()), "data['a']"),
    (broadcast(a=X.to("meta")), "meta"),
    (broadcast(["a", "b"], b=X.to("meta")), "device"),
    (
        lambda w: tp.vocab_parallel_cross_entropy(None if w else X, torch.zeros(2).long()),
        "which asks for sizes",
    ),
]


@on_ranks(RANKS)
def test_an_error_of_one_rank_is_an_error_of_all(rank):
    cases = [(partial(c, rank == 1), kind, w) for kind, rows in SHARED.items() for c, w in rows]
    cases += [(partial(call, rank == 0), ArgumentError, word) for call, word in OF_FIRST]
    assert not faults(cases)
    assert varcomm.all_reduce(torch.ones(())).item() == 3.0


@on_ranks(RANKS)
def test_a_norm_over_another_group(rank):
    groups = [torch.distributed.new_group([r]) for r in range(RANKS)]
    spec = varcomm.sharding.ShardSpec.of([2], 0, groups[rank])
    parameter = varcomm.sharding.mark(nn.Parameter(torch.ones(2)), spec)
    assert not faults([(partial(tp.grad_norm, [parameter]), ArgumentError, "another group")])


# Inside debug(), ranks that differ all raise: call, word of the message.
DIFFERENT = [
    (lambda r: vocabulary(r, IDS + (r == 1)), "ids"),
    (lambda r: vocabulary(r, padding_idx=r), "padding_idx"),
    (lambda r: vocabulary(r, exchange="sum" if r else "rows"), "operation"),
    (lambda r: vocabulary(r, sequence_sizes=[r, 2 - r, 1]), "sequence_sizes"),
    (lambda r: features(r, IDS.flip(0) if r else IDS), "ids"),
    (lambda r: of_logits(r, target=torch.tensor([r, 0, 1])), "values of target"),
    (lambda r: of_logits(r, label_smoothing=0.1 * r), "options"),
    (lambda r: of_logits(r, weight=None if r else torch.ones(5)), "weights"),
    (lambda r: of_hidden(r, weight=torch.zeros(SPLIT[r], 4 + (r == 1))), "weight"),
    (lambda r: tp.column_parallel_linear(X[:1], W, sequence_sizes=[1, 1, 1 + r]), "sizes"),
    (lambda r: tp.row_parallel_linear(X, W if r == 0 else W.T), "weight"),
    (lambda r: HEADED(4, 3, head_dim=4)(torch.ones(3, 4), lambda x: x[: 3 - r]), "query"),
    (lambda r: tp.clip_grad_norm_([], 1.0 + r), "max_norm"),
    (lambda r: tp.grad_norm([], 1.0 + r), "norm_type"),
]


@on_ranks(RANKS)
def test_differences_inside_debug(rank):
    with varcomm.debug():
        wrong = faults((partial(c, rank), DisagreementError, word) for c, word in DIFFERENT)
    assert not wrong


@pytest.mark.parametrize(
    "init",
    [
        *(nn.init.zeros_, nn.init.ones_, nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_),
        *(torch.Tensor.zero_, partial(nn.init.constant_, val=2.0), lambda w: w.fill_(torch.nan)),
        lambda w: w.copy_(torch.randn(w.shape)),
        lambda w, generator: w.cauchy_(generator=generator),
    ],
)
def test_inits_of_single_elements_are_accepted(init):
    drawing(init)


@pytest.mark.parametrize("name", ["xavier_uniform_", "kaiming_uniform_", "orthogonal_", "eye_"])
def test_inits_of_the_full_shape_are_refused(name):
    init = getattr(nn.init, name)
    for given in (init, lambda w: init(w)):
        with pytest.raises(ArgumentError, match="with the std of the full shape"):
            drawing(given)


def test_inits_are_checked_with_values_in_fake_mode():
    with FakeTensorMode():
        drawing(nn.init.normal_)
        with pytest.raises(ArgumentError, match="with the std of the full shape"):
            drawing(nn.init.xavier_uniform_)
