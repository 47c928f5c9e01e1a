"""Methods that reach a function get another one: however they reach it, and nobody else."""

import abc
import copy
import dataclasses
import functools
import importlib
import linecache
import sys

import pytest
import torch
import torch_geometric
import torch_geometric.nn as gnn
from torch import nn
from torch.nn.utils import parametrize
from torch_geometric.nn import global_add_pool, global_mean_pool

from varcomm import ArgumentError
from varcomm.graph.adapt.named import Names
from varcomm.graph.adapt.rebind import Rebinding, release


def whole():
    return "whole"


def ours():
    return "ours"


def calls_whole():
    return whole()


def ping(count):
    return whole() if count == 0 else pong(count - 1)


def pong(count):
    return ping(count)


def countdown(count):
    return whole() if count == 0 else countdown(count - 1)


def enclosing():
    held = whole

    def function(self):
        return held()

    return function


def named():
    return whole(), __name__


class ByName(nn.Module):
    def forward(self):
        return whole()


class ByFunction(nn.Module):
    def forward(self):
        return calls_whole()


class InTurns(nn.Module):
    def forward(self):
        return ping(3)


class Recursive(nn.Module):
    def forward(self):
        return countdown(2)


class Inside(nn.Module):
    """Reached by functions which a method defines."""

    def forward(self):
        return [(lambda: whole())() for _ in range(2)][1]


class ByDefault(nn.Module):
    def forward(self, function=whole, *, others=(whole,)):
        return function() if function is others[0] else "others"


class Enclosed(nn.Module):
    forward = enclosing()


class Wrapped(nn.Module):
    """By a decorator that hides the method."""

    @torch.no_grad()
    def forward(self):
        return whole()


class ByAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = whole

    def forward(self):
        return self.function()


class ByList(nn.Module):
    def __init__(self):
        super().__init__()
        self.functions = [len, {"it": (whole,)}]

    def forward(self):
        return self.functions[1]["it"][0]()


class ByPartial(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = functools.partial(calls_whole)

    def forward(self):
        return self.function()


class ByBoundMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = self.method

    def method(self):
        return whole()

    def forward(self):
        return self.function()


class OtherMembers(nn.Module):
    @staticmethod
    def static():
        return whole()

    @classmethod
    def of_class(cls):
        return whole()

    @property
    def held(self):
        """What is held."""
        return whole()

    def forward(self):
        told = {self.static(), self.of_class(), self.held, type(self).held.__doc__}
        return "ours" if told == {"ours", "What is held."} else told


class Child(ByName):
    def forward(self):
        return super().forward()


class Between:
    def forward(self):
        return super().forward()


class Grandchild(Between, Child):
    def forward(self):
        inner = super(Grandchild, self).forward()  # noqa: UP008
        return inner if inner == whole() else (inner, whole())


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self): ...


class Concrete(Abstract):
    def forward(self):
        return calls_whole()


REACHED = (
    ByName,
    ByFunction,
    InTurns,
    Recursive,
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
    Concrete,
)


@pytest.mark.parametrize("kind", REACHED)
def test_it_is_reached(kind):
    module, other = kind(), kind()
    rebind = Rebinding({whole: ours})
    rebind.check(module, "it")
    before = other()
    rebind(module)
    assert module() == "ours"
    assert other() == before != "ours"
    assert type(module).__name__ == kind.__name__
    assert isinstance(module, kind)
    twin = copy.deepcopy(module)
    for one in (module, twin):
        assert one() == "ours"
        release(one)
        assert one() == before
        assert type(one) is kind
    Rebinding({whole: lambda: "others"})(twin)
    Rebinding({whole: ours})(twin)
    assert twin() == "ours"
    release(twin)
    assert twin() == before
    assert vars(twin).keys() == vars(other).keys()


class ByModule(nn.Module):
    def forward(self, x, batch):
        return gnn.global_add_pool(x, batch), gnn.Linear(2, 3).out_channels


class ByModules(nn.Module):
    def forward(self, x, batch):
        return torch_geometric.nn.pool.global_add_pool(x, batch), gnn.global_mean_pool(x, batch)


def test_it_is_reached_through_modules_of_python():
    x, batch = torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)
    rebind = Rebinding({global_add_pool: lambda x, batch: "sum"})
    first, second = ByModule(), ByModules()
    for module in (first, second):
        rebind.check(module, "it")
        rebind(module)
    assert first(x, batch) == ("sum", 3)
    told, mean = second(x, batch)
    assert told == "sum"
    assert torch.equal(mean, torch.ones(1, 2))
    assert gnn.global_add_pool is global_add_pool is torch_geometric.nn.pool.global_add_pool
    rebind = Rebinding({global_add_pool: ours, global_mean_pool: lambda x, batch: "mean"})
    rebind(second)
    assert gnn.global_mean_pool is global_mean_pool
    with pytest.raises(TypeError):
        second(x, batch)  # ours() takes nothing


class Method(nn.Module):
    def forward(self):
        return self.inner() + " " + whole()

    def inner(self):
        return "theirs"


class OfItsOwn(Method):
    def inner(self):
        return "its own"


def test_a_method_may_be_exchanged_itself():
    rebind = Rebinding({whole: ours, Method.inner: lambda self: f"{type(self).__name__}'s"})
    first, second = Method(), OfItsOwn()
    for module in (first, second):
        rebind.check(module, "it")
        rebind(module)
    assert first() == "Method's ours"
    assert second() == "its own ours"
    # classes are made once
    third = Method()
    rebind(third)
    assert type(third) is type(first)


class Named(nn.Module):
    def forward(self):
        return named()


def test_a_function_may_know_the_name_of_its_module():
    module = Named()
    Rebinding({whole: ours})(module)
    assert module() == ("ours", __name__)


class Untouched(nn.Module):
    """`whole` is no function here, but an attribute."""

    def __init__(self, whole=3):
        super().__init__()
        self.whole = whole
        self.layers = nn.ModuleList([nn.Linear(1, 1)])

    def forward(self):
        return self.whole


def test_whoever_does_not_reach_it_stays_as_it_is():
    module = Untouched()
    Rebinding({whole: ours})(module)
    assert type(module) is Untouched
    assert module() == 3
    assert vars(module).keys() == vars(Untouched()).keys()


def test_what_was_set_since_is_kept():
    module = ByAttribute()
    Rebinding({whole: ours})(module)
    module.function = len
    release(module)
    assert module.function is len


class Importing(nn.Module):
    def forward(self, x, batch):
        from torch_geometric.nn import global_add_pool

        return global_add_pool(x, batch)


class ImportingAll(nn.Module):
    def forward(self, x, batch):
        import torch_geometric

        return torch_geometric.nn.global_add_pool(x, batch)


class ImportingAs(nn.Module):
    def forward(self, x, batch):
        import torch_geometric.nn as gnn

        return gnn.global_add_pool(x, batch)


class ByClass(ByName):
    def forward(self):
        return ByName.forward(self)


class ImportedLater(ByName):
    """By its class, in a function that it defines."""

    def forward(self):
        def inner():
            return ByName.forward(self)

        return inner()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Importing, r"distribute it: Importing\.forward imports torch_geometric\.nn when it"),
        (
            ImportingAll,
            r"distribute it: ImportingAll\.forward imports torch_geometric when it runs",
        ),
        (ImportingAs, r"distribute it: ImportingAs\.forward imports torch_geometric\.nn when it"),
        (ByClass, r"distribute it: ByClass\.forward calls ByName\.forward by its class, and would"),
        (ImportedLater, r"ImportedLater\.forward calls ByName\.forward by its class, .* super\(\)"),
    ],
)
def test_what_cannot_be_rebound_is_refused(kind, message):
    rebind = Rebinding({whole: ours, global_add_pool: ours})
    with pytest.raises(ArgumentError, match=message):
        rebind.check(kind(), "it")
    # unless that is not among what is exchanged
    Rebinding({global_mean_pool: ours}).check(kind(), "it")


class Linear(nn.Linear):
    def forward(self, x):
        return whole(), super().forward(x)


def test_classes_exchanged_in_between():
    module = Linear(2, 2)
    rebind = Rebinding({whole: ours})
    rebind(module)
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    assert module(torch.ones(2))[0] == "ours"
    with pytest.raises(ArgumentError, match="its class was exchanged after it was distributed, as"):
        rebind.check(module, "it")
    before = Linear(2, 2)
    parametrize.register_parametrization(before, "weight", nn.Tanh())
    rebind.check(before, "it")
    rebind(before)
    assert before(torch.ones(2))[0] == "ours"


def test_names_in_code():
    assert Names.of(Inside.forward.__code__).of_globals == {"whole", "range"}
    assert Names.of(OfItsOwn.forward.__code__).of_attributes == {"inner"}


@pytest.mark.parametrize("name", ["code", "a_program"])
def test_a_program_may_have_a_name_of_python(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text("def call(function):\n    return whole()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    program = importlib.import_module(name)
    program.whole = whole

    class Calling(nn.Module):
        def forward(self):
            return program.call(self)

    module = Calling()
    Rebinding({whole: ours})(module)
    assert module() == "ours"
    del sys.modules[name]


def made_by(how):
    """A class that says it is of a module of Python."""
    if how == "dataclasses":
        namespace = {"forward": lambda self: whole()}
        return dataclasses.make_dataclass("Made", [], bases=(nn.Module,), namespace=namespace)
    names = {"nn": nn, "whole": whole}  # in which there is no __name__
    if how == "exec with a name":
        names["__name__"] = "types"
    exec("class Made(nn.Module):\n    def forward(self):\n        return whole()", names)
    return names["Made"]


@pytest.mark.parametrize("how", ["exec", "exec with a name", "dataclasses"])
def test_a_class_may_say_that_it_is_of_python(how):
    kind = made_by(how)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    Rebinding({whole: ours})(module)
    assert module() == "ours"


def test_what_python_keeps_is_not_gone_through(monkeypatch):
    """Its lines of all files, say, of which a program that compiles has millions."""
    monkeypatch.setattr(linecache, "cache", {"file": (1, None, [whole], "file")})

    class Reading(nn.Module):
        def forward(self):
            return linecache.getlines("file")

    module = Reading()
    Rebinding({whole: ours})(module)
    assert type(module) is Reading
    assert module() == [whole]


def test_a_container_that_holds_itself():
    ring = [len]
    ring.append(ring)

    class Holding(nn.Module):
        def forward(self):
            return whole(), len(ring)

    module = Holding()
    Rebinding({whole: ours})(module)
    assert module() == ("ours", 2)


def test_a_variable_that_is_not_set_yet():
    def outer():
        class Early(nn.Module):
            def forward(self):
                return late()

        module = Early()
        Rebinding({whole: ours})(module)
        late = whole
        return module()

    # it was not there to be seen
    assert outer() == "whole"
