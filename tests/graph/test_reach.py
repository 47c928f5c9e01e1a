"""Functions of PyG that need all nodes are exact however the code of a model reaches them."""

import copy
import functools

import pytest
import torch
import torch_geometric
import torch_geometric.nn as gnn
from torch import nn
from torch.nn.utils import parametrize
from torch_geometric.nn import global_add_pool

from tests.graph.graphs import wild
from tests.ops.comparing import Failures, assert_none
from varcomm import ArgumentError
from varcomm.graph import distribute, partition


def pooled(x):
    return global_add_pool(x, None)


def ping(x, count):
    return global_add_pool(x, None) if count == 0 else pong(x, count - 1)


def pong(x, count):
    return ping(x, count)


def enclosing():
    held = global_add_pool

    def function(self, x):
        return held(x, None)

    return function


class ByName(nn.Module):
    def forward(self, x):
        return global_add_pool(x, None)


class ByFunction(nn.Module):
    def forward(self, x):
        return pooled(x)


class InTurns(nn.Module):
    def forward(self, x):
        return ping(x, 3)


class Inside(nn.Module):
    """Reached by functions that a method defines."""

    def forward(self, x):
        return [(lambda: global_add_pool(x, None))() for _ in range(2)][1]


class ByDefault(nn.Module):
    def forward(self, x, function=global_add_pool, *, others=(global_add_pool,)):
        assert function is others[0]
        return function(x, None)


class Enclosed(nn.Module):
    forward = enclosing()


class Wrapped(nn.Module):
    """By a decorator that hides the method."""

    @torch.no_grad()
    def forward(self, x):
        return global_add_pool(x, None)


class ByAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = global_add_pool

    def forward(self, x):
        return self.function(x, None)


class ByList(nn.Module):
    def __init__(self):
        super().__init__()
        self.functions = [len, {"it": (global_add_pool,)}]

    def forward(self, x):
        return self.functions[1]["it"][0](x, None)


class ByPartial(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = functools.partial(pooled)

    def forward(self, x):
        return self.function(x)


class ByBoundMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = self.method

    def method(self, x):
        return global_add_pool(x, None)

    def forward(self, x):
        return self.function(x)


class OtherMembers(nn.Module):
    @staticmethod
    def static(x):
        return global_add_pool(x, None)

    @classmethod
    def of_class(cls, x):
        return global_add_pool(x, None)

    @property
    def held(self):
        return pooled

    def forward(self, x):
        return (self.static(x) + self.of_class(x) + global_add_pool(x, None)) / 3


class Child(ByName):
    def forward(self, x):
        return super().forward(x)


class Between:
    def forward(self, x):
        return super().forward(x)


class Grandchild(Between, Child):
    def forward(self, x):
        inner = super(Grandchild, self).forward(x)  # noqa: UP008
        return (inner + global_add_pool(x, None)) / 2


class ByModule(nn.Module):
    def forward(self, x):
        return gnn.global_add_pool(x, None)


class ByModules(nn.Module):
    def forward(self, x):
        return torch_geometric.nn.pool.global_add_pool(x, None)


class Linear(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return global_add_pool(x, None)


def parametrized():
    return parametrize.register_parametrization(Linear(), "weight", nn.Tanh())


REACHED = (
    ByName,
    ByFunction,
    InTurns,
    Inside,
    ByDefault,
    Enclosed,
    Wrapped,
    ByAttribute,
    ByList,
    ByPartial,
    ByBoundMethod,
    OtherMembers,
    Child,
    Grandchild,
    ByModule,
    ByModules,
    Linear,
    parametrized,
)


def check_reached(rank):
    failures, data = Failures(), wild()
    graph, other = partition(data, method="random"), partition(data, method="block")
    total = data.x.sum(0, keepdim=True)
    for kind in REACHED:
        torch.manual_seed(0)
        module, untouched = kind(), kind()
        keys = vars(untouched).keys()
        distribute(module, graph)
        twin = copy.deepcopy(module)
        with failures.named(kind.__name__):
            assert type(module).__name__ == type(untouched).__name__
            torch.testing.assert_close(module(graph.x), total)
            torch.testing.assert_close(twin(graph.x), total)
            torch.testing.assert_close(distribute(twin, other)(other.x), total)
            # another module of the class, and PyG's own function, stay as they are
            torch.testing.assert_close(untouched(data.x), total)
            assert vars(untouched).keys() == keys
    assert gnn.global_add_pool is global_add_pool is torch_geometric.nn.pool.global_add_pool
    return failures


def test_functions_are_reached(worlds):
    assert_none(worlds.run(3, check_reached))


class Importing(nn.Module):
    def forward(self, x):
        from torch_geometric.nn import global_add_pool

        return global_add_pool(x, None)


class ImportingAll(nn.Module):
    def forward(self, x):
        import torch_geometric

        return torch_geometric.nn.global_add_pool(x, None)


class ByClass(ByName):
    def forward(self, x):
        return ByName.forward(self, x)


class ByClassInside(ByName):
    def forward(self, x):
        def inner():
            return ByName.forward(self, x)

        return inner()


def check_refused(rank):
    graph = partition(wild(), method="block")
    for kind in (Importing, ImportingAll, ByClass, ByClassInside):
        with pytest.raises(ArgumentError, match=f"cannot distribute .*{kind.__name__}"):
            distribute(kind(), graph)
    torch.manual_seed(0)
    module = distribute(Linear(), graph)
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    with pytest.raises(ArgumentError, match="its class was exchanged after it was distributed"):
        distribute(module, graph)


def test_ways_that_cannot_be_followed_are_refused(worlds):
    assert worlds.run(3, check_refused) == [None] * 3


def scaled(x):
    return x


class Scaled(nn.Module):
    def forward(self, x):
        return scaled(global_add_pool(x, None))


def check_changed(rank):
    """A name that changed since is looked up again by the next call of distribute."""
    graph, total = partition(wild(), method="random"), wild().x.sum(0, keepdim=True)
    model = distribute(Scaled(), graph)
    before, scope = model(graph.x), globals()
    own = scope["scaled"]
    scope["scaled"] = lambda x: 2 * x
    try:
        torch.testing.assert_close(distribute(model, graph)(graph.x), 2 * total)
    finally:
        scope["scaled"] = own
    torch.testing.assert_close(before, total)
    torch.testing.assert_close(distribute(model, graph)(graph.x), total)


def test_names_that_changed_since(worlds):
    assert worlds.run(3, check_changed) == [None] * 3
