"""Random programs in which one rank makes another call of equal size, outside of debug().

All messages fit each other, so that nothing fails where the calls are made. Each program ends with
sums over ranks. A swap is found if all ranks raise DisagreementError at the first of them, or at a
sum of the program itself.
"""

import random
from functools import cache, partial

import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data, HeteroData

import varcomm
from varcomm import DisagreementError, ExchangePlan
from varcomm.data_parallel import sum_gradients
from varcomm.graph import distribute, partition
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

RANKS, ROWS, WIDTH = 3, 2, 6  # rows and columns of a rank's tensors
EVEN, ALL = [ROWS] * RANKS, ROWS * RANKS
AT_ONCE = 500

# dtypes of one width that are summed, and that have gradients on CPUs
SAME = (
    (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float16, torch.bfloat16, torch.int16),
    (torch.float32, torch.int32),
    (torch.float64, torch.int64, torch.complex64),
)
SAME_WITH_GRADIENTS = (torch.float16, torch.bfloat16), (torch.float64, torch.complex64)
SUMS = [dtype for same in SAME for dtype in same]

KINDS = {}


def kind(builder):
    """Register a function that draws two calls whose messages have equal sizes."""
    KINDS[builder.__name__.replace("_", " ")] = builder
    return builder


class Draws(random.Random):
    """Choices that are the same on all ranks, and the rank."""

    def __init__(self, seed, rank):
        super().__init__(seed)
        self.rank, self.in_backward = rank, self.random() < 0.5

    def tensor(self, *shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype, requires_grad=self.in_backward)

    def dtypes(self):
        return self.sample(self.choice(SAME_WITH_GRADIENTS if self.in_backward else SAME), 2)

    def two(self, calls):
        return self.sample([*calls], 2)

    def one_or_order(self, first, second):
        """Return calls of which one rank makes the other, or both in the other order."""
        if self.random() < 0.5:
            return first, second
        return lambda: [first(), second()], lambda: [second(), first()]


def moves(d, dtype=torch.float32):
    """Return calls that move rows, by name."""
    rows, whole = (partial(d.tensor, n, WIDTH, dtype=dtype) for n in (ROWS, ALL))
    return {
        "all_gather_v": lambda: varcomm.all_gather_v(rows(), EVEN),
        "gather_v": lambda: varcomm.gather_v(rows(), EVEN),
        "scatter_v": lambda: varcomm.scatter_v(whole(), EVEN, like=whole()),
        "broadcast": lambda: varcomm.broadcast(rows(), like=rows()),
        "all_to_all_v": lambda: varcomm.all_to_all_v(whole(), EVEN, EVEN),
        "plan": lambda: plans()[0](rows()),
    }


def sums(d, dtype=torch.float32):
    """Return calls that sum, by name."""
    rows, whole = (partial(d.tensor, n, WIDTH, dtype=dtype) for n in (ROWS, ALL))
    return {
        "reduce_scatter_v": lambda: varcomm.reduce_scatter_v(whole(), EVEN),
        "all_reduce": lambda: varcomm.all_reduce(rows()),
        "reduce": lambda: varcomm.reduce(rows()),
        "plan.adjoint": lambda: plans()[0].adjoint(d.tensor(RANKS, WIDTH, dtype=dtype)),
    }


@cache
def plans():
    """Return plans of equal counts that send other rows."""
    return [ExchangePlan.from_indices([torch.tensor([row])] * RANKS, ROWS) for row in range(ROWS)]


@cache
def graph_layers():
    nodes = torch.arange(ALL)
    edges = torch.stack([nodes, (nodes + ROWS) % ALL])
    graph = partition(Data(edge_index=edges, num_nodes=ALL), method="block")
    layers = torch.nn.ModuleList(pyg.GraphConv(WIDTH, WIDTH) for _ in range(2))
    return list(distribute(layers, graph)), graph


@cache
def relations():
    """Return two relations that read as many rows of the rank before, other ones."""
    data, nodes = HeteroData(), torch.arange(2 * ALL).view(RANKS, 2 * ROWS)
    data["a"].num_nodes = nodes.numel()
    keys = [("a", name, "a") for name in ("near", "far")]
    for key, part in zip(keys, nodes.split(ROWS, 1), strict=True):
        data[key].edge_index = torch.stack([part.reshape(-1), part.roll(1, 0).reshape(-1)])
    graph = partition(data, method="block")
    return [graph.edge_index_dict[key] for key in keys]


@cache
def parallel_layers():
    """Return pairs of layers of equal shapes, with the rows and columns of their inputs."""
    features, sequence = WIDTH * RANKS, {"sequence_sizes": EVEN}
    made = (
        (ColumnParallelLinear, WIDTH, features, {}, ALL),
        (ColumnParallelLinear, WIDTH, features, sequence, ROWS),
        (ColumnParallelLinear, WIDTH, features, {"gather_output": True}, ALL),
        (RowParallelLinear, features, WIDTH, {}, ALL),
        (RowParallelLinear, features, WIDTH, sequence, ALL),
    )
    return [([cls(i, o, **how) for _ in range(2)], rows) for cls, i, o, how, rows in made]


@cache
def embeddings():
    return [VocabParallelEmbedding(4 * RANKS, WIDTH) for _ in range(2)]


def prepare():
    """Make what is collective, in one order on all ranks."""
    torch.manual_seed(0)
    for make in (plans, graph_layers, relations, parallel_layers, embeddings):
        make()


@kind
def dtype_of_moves(d):
    first, second = d.dtypes()
    name = d.choice([*moves(d)])
    return d.one_or_order(moves(d, first)[name], moves(d, second)[name])


@kind
def dtype_of_sums(d):
    first, second = d.dtypes()
    name = d.choice([*sums(d)])
    return d.one_or_order(sums(d, first)[name], sums(d, second)[name])


@kind
def dtype_of_handles(d):
    rows = [d.tensor(ROWS, WIDTH, dtype=dtype) for dtype in d.dtypes()]
    calls = [lambda x=x: varcomm.all_gather_v(x, EVEN, async_op=True).wait() for x in rows]
    return d.one_or_order(*calls)


@kind
def operation(d):
    d.in_backward = False  # the adjoints send messages in other ways
    names = "all_to_all_v", "reduce_scatter_v"
    calls = {**moves(d), **sums(d)}
    turned = d.tensor(ROWS, WIDTH * RANKS)
    return d.one_or_order(
        *d.two(
            [
                *(calls[name] for name in names),
                lambda: varcomm.transpose_v(turned, 1, [WIDTH] * RANKS, 0, EVEN),
            ]
        )
    )


@kind
def dim(d):
    x = d.tensor(ROWS, ROWS, ROWS)
    calls = [lambda dim=dim: varcomm.all_gather_v(x, EVEN, dim) for dim in range(3)]
    return d.one_or_order(*d.two(calls))


@kind
def shape_of_a_row(d):
    call = d.choice(
        (
            lambda shape: varcomm.all_gather_v(d.tensor(ROWS, *shape), EVEN),
            lambda shape: varcomm.all_reduce(d.tensor(*shape)),
            lambda shape: plans()[0](d.tensor(ROWS, *shape)),
        )
    )
    first, second = d.two([(WIDTH,), (2, 3), (3, 2), (1, WIDTH)])
    return d.one_or_order(lambda: call(first), lambda: call(second))


@kind
def sizes(d):
    xs = [d.tensor(rows, WIDTH // rows) for rows in (1, 2, 3, 6)]
    calls = [lambda x=x: varcomm.all_gather_v(x, [len(x)] * RANKS) for x in xs]
    return d.one_or_order(*d.two(calls))


@kind
def use_fp32(d):
    dtype = d.choice((torch.bfloat16, torch.float16, torch.float32))
    rows, whole = (d.tensor(n, WIDTH, dtype=dtype) for n in (ROWS, ALL))
    call = d.choice(
        (
            lambda wide: varcomm.all_reduce(rows, wide),
            lambda wide: varcomm.reduce_scatter_v(whole, EVEN, use_fp32=wide),
            lambda wide: varcomm.all_gather_v(rows, EVEN, use_fp32=wide),
        )
    )
    return lambda: call(True), lambda: call(False)


@kind
def plan(d):
    rows, received = d.tensor(ROWS, WIDTH), d.tensor(RANKS, WIDTH)
    call = d.choice((lambda p: p(rows), lambda p: p.adjoint(received)))
    return d.one_or_order(*[lambda p=p: call(p) for p in plans()])


@kind
def relation(d):
    x = d.tensor(2 * ROWS, WIDTH)
    return d.one_or_order(*[lambda edges=edges: x[edges[0]] for edges in relations()])


@kind
def root(d):
    """Calls without rows, which send nothing to any root."""
    x = d.tensor(0, WIDTH)
    calls = [lambda dst=dst: varcomm.gather_v(x, [0] * RANKS, dst=dst) for dst in range(RANKS)]
    calls += [lambda src=src: varcomm.broadcast(x, src, like=x) for src in range(RANKS)]
    return d.two(calls)


@kind
def like(d):
    shapes = d.two([(ROWS, WIDTH), (WIDTH, ROWS), (ROWS * WIDTH,)])
    xs = [d.tensor(*shape) for shape in shapes]
    return d.one_or_order(*[lambda x=x: varcomm.broadcast(x, like=x) for x in xs])


@kind
def graph_layer(d):
    layers, graph = graph_layers()
    x = d.tensor(ROWS, WIDTH)
    d.in_backward = True  # of the parameters' gradients
    return d.one_or_order(*[lambda layer=layer: layer(x, graph.edge_index) for layer in layers])


@kind
def parallel_linear(d):
    layers, rows = d.choice(parallel_layers())
    d.in_backward = True
    columns = layers[0].weight.shape[1]
    x = d.tensor(rows, columns)
    return d.one_or_order(*[lambda layer=layer: layer(x) for layer in layers])


@kind
def parallel_embedding(d):
    ids = torch.arange(ROWS)
    d.in_backward = True
    return d.one_or_order(*[lambda layer=layer: layer(ids) for layer in embeddings()])


@kind
def call_without_messages(d):
    x = d.tensor(0)
    return lambda: None, lambda: varcomm.broadcast(x, like=x)


@kind
def order_in_backward(d):
    d.in_backward = True
    rows, received = d.tensor(ROWS, WIDTH), d.tensor(RANKS, WIDTH)
    calls = [lambda p=p: p(rows) for p in plans()]
    calls += [lambda p=p: p.adjoint(received) for p in plans()]
    return in_orders(d, d.two(calls))


def in_orders(d, calls):
    """Return the calls with their backward in one order, and in the other."""

    def both(order):
        ys = [call() for call in calls]
        for y in ys[::order]:
            backward(y)

    d.in_backward = True
    return lambda: both(1), lambda: both(-1)


# --- Calls of equal names: nothing tells them apart


@kind
def equal_calls(d):
    xs = [d.tensor(ROWS, WIDTH) for _ in range(2)]
    return d.one_or_order(*[lambda x=x: varcomm.all_gather_v(x, EVEN) for x in xs])


@kind
def equal_calls_in_backward(d):
    d.in_backward = True
    name = d.choice(("all_gather_v", "all_to_all_v", "plan"))
    return in_orders(d, [moves(d)[name]] * 2)


@kind
def equal_models(d):
    """Two models of equal shapes; of which some entries travel too, in every fourth sum."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 2) for _ in range(2)]

    def step(order):
        for model in models:
            model(torch.ones(1, 2)).sum().backward()
        for model in models[::order]:
            sum_gradients(model)

    return lambda: step(1), lambda: step(-1)


NOT_FOUND = {"equal calls", "equal calls in backward", "equal models"}


def backward(result):
    for y in result if isinstance(result, list) else [result]:
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.backward(torch.ones_like(y))


def program(d, name):
    """Run a program; return where ranks differed, or ""."""
    pair, culprit = KINDS[name](d), d.randrange(RANKS)
    calls = [*moves(d).values(), *sums(d).values()]
    before, after = d.choices(calls, k=d.randrange(3)), d.choices(calls, k=d.randrange(2))
    dtype = d.choice(SUMS)
    try:
        for call in before:
            call()
        result = pair[d.rank == culprit]()
        if d.in_backward:
            backward(result)
        for call in after:
            call()
    except DisagreementError as error:
        return where_of(error, "inside")
    for number in range(4):
        try:
            if number < 3:
                varcomm.all_reduce(torch.ones(2, dtype=dtype))
            else:
                varcomm.check()
        except DisagreementError as error:
            return where_of(error, f"sum {number + 1}")
    return ""


def where_of(error, where):
    """Return where a swap was found, if the error is one of the comparison."""
    if "ranks have made different calls" in str(error):
        return where
    if "exchange: ranks disagree" in str(error):  # one of the first of a graph
        return "at once"
    return "by values" if "no longer have the same values" in str(error) else f"other: {error}"


def on_ranks(rank, numbers, names=tuple(KINDS)):
    """Run the programs of these numbers, of one kind after the other; return what was found."""
    prepare()
    varcomm.check()
    found = []
    for number in numbers:
        name = names[number % len(names)]
        found.append((name, program(Draws(number, rank), name)))
    return found


def verdict(answers):
    """Return the differences between ranks, and the swaps that should have been found, as texts."""
    if any(other != answers[0] for other in answers[1:]):
        pairs = (each for each in zip(*answers, strict=True) if len({*each}) > 1)
        return [f"ranks differ: {each}" for each in pairs]
    return [
        f"{name}: {found or 'not found'}"
        for name, found in answers[0]
        if found.startswith("other") or (not found and name not in NOT_FOUND)
    ]
