"""Each private name of torch does what ``varcomm/_torch_private.py`` needs it for.

Alone, on any torch: ``python tests/test_torch_private.py`` from the root needs torch only.
"""

import copy
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from varcomm import _torch_private as private

ALONE = __name__ == "__main__"


@contextmanager
def world():
    """Make this process the world, on Gloo."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=70)
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_transforms_are_seen():
    seen = []

    def fn(x):
        seen.append(private.transforms_active())
        return x.sum()

    torch.func.grad(fn)(torch.ones(2))
    assert (seen, private.transforms_active()) == ([True], False)


def test_a_class_that_refuses_operators_has_an_alias():
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, *_):
            raise ValueError(func)

    leaf = torch.ones(2).as_subclass(Refuses).requires_grad_()
    with private.WithoutDispatch():
        alias = leaf.as_subclass(torch.Tensor)
    alias.square().sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0]
    try:
        torch.vmap(torch.sin)(leaf)
    except ValueError:
        return
    raise AssertionError("operators are not refused")


def operators():
    """Define two operators without a use of their results."""
    library = torch.library.Library("varcomm_private", "FRAGMENT")  # ends its operators when freed
    for name in ("plain", "effect"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.clone, "CompositeExplicitAutograd")
        torch.library.register_fake(f"varcomm_private::{name}", torch.empty_like, lib=library)
    private.register_effect(torch.ops.varcomm_private.effect.default)
    return library


def test_an_effect_is_kept_in_a_graph():
    library = operators()

    def fn(x):
        torch.ops.varcomm_private.plain(x)
        torch.ops.varcomm_private.effect(x)
        return 2 * x

    graph = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(torch.ones(2))
    graph.graph.eliminate_dead_code()
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    kept = [name for name in names if "varcomm_private" in name or "with_effects" in name]
    assert (len(kept), library.ns) == (1, "varcomm_private")


def test_functional_mode_passes_operators_to_a_rule():
    library = torch.library.Library("varcomm_private", "FRAGMENT")
    library.define("ruled(Tensor x) -> Tensor")
    library.impl("ruled", torch.clone, "CompositeExplicitAutograd")
    called = []

    def rule(mode, func, types, args=(), kwargs=None):
        called.append(func)
        return mode.__torch_dispatch__(func, types, args, kwargs or {})

    torch.library.register_torch_dispatch(
        "varcomm_private::ruled", private.FunctionalTensorMode, rule, lib=library
    )
    with private.FunctionalTensorMode():
        torch.ops.varcomm_private.ruled(torch.ones(2))
    assert len(called) == 1


def test_a_mode_sees_backward():
    class Names(private.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    y = x.sin().sum()
    with Names() as mode:
        y.backward()
    assert "cos" in mode.names


def test_compiled_code_unpacks_by_unbind():
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.unbind:
                return args[0].plain * 2, args[0].plain * 3
            return super().__torch_function__(func, types, args, kwargs or {})

    def fn(x):
        first, second = x
        return first + [*x][1] + second

    private.unpack_by_unbind(Named)
    x = torch.ones(2).as_subclass(Named)
    x.plain = torch.ones(1)
    torch._dynamo.reset()
    assert torch.compile(fn, backend="eager", fullgraph=True)(x).tolist() == [8.0]


def test_marked_sizes_vary_in_compiled_code():
    counts = []

    class Holder(torch.nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.held = private.let_vary(torch.ones(rows, 2), 0)

        def forward(self, x):
            return x + self.held.shape[0]

    def backend(graph, example_inputs):
        counts.append(1)
        return graph.forward

    torch._dynamo.reset()
    module = Holder(3)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    results = []
    for rows in (3, 5, 7):
        module.held = private.let_vary(torch.ones(rows, 2), 0)
        results.append(compiled(torch.zeros(1)).item())
    assert (results, len(counts)) == ([3, 5, 7], 1)


def test_versions_count_changes_in_place():
    x = torch.ones(2)
    before = private.version_of(x)
    x.add_(1)
    with torch.inference_mode():
        unchanging = torch.ones(2).add_(1)
    assert (private.version_of(x), private.version_of(unchanging)) == (before + 1, 0)


def test_a_condition_that_does_not_hold_fails_with_its_text():
    private.assert_on_device(torch.tensor(True), "holds")
    text = ""
    try:
        private.assert_on_device(torch.tensor(False), "ids out of range" + 300 * "!")
    except RuntimeError as error:
        text = str(error)
    assert "ids out of range" in text
    assert text.count("!") == 254 - len("ids out of range")  # all that a GPU takes


def test_a_call_at_the_end_of_backward():
    order, x = [], torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: private.at_end_of_backward(lambda: order.append("end")))
    x.register_hook(lambda _: order.append("backward"))
    y.sum().backward()
    private.at_end_of_backward(lambda: order.append("at once"))
    assert order == ["backward", "end", "at once"]


def test_a_module_notices_new_parameters():
    class Layer(private.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, device="meta"))
            self.noticed = []

        def after_conversion(self):
            self.noticed.append(self.weight.device.type)

    model = torch.nn.Sequential(Layer(), torch.nn.Linear(2, 2))
    before = model[0].weight
    model.to_empty(device="cpu")
    assert model[0].noticed == ["cpu"]
    assert model[0].weight is not before
    assert copy.deepcopy(model).double()[0].noticed == ["cpu", "cpu"]


def test_groups():
    """A group made by its members has its name and timeout, and exists until it is destroyed."""
    with world() as everyone:
        made = private.make_group([0], 0, "gloo", "own name", timedelta(seconds=40))
        assert private.timeout_of(made, torch.device("cpu")) == timedelta(seconds=40)
        assert private.timeout_of(everyone, torch.device("cpu")) == timedelta(seconds=70)
        assert private.group_named("own name") is made
        assert private.group_named("no name") is None
        assert (private.group_exists(made), private.group_exists(everyone)) == (True, True)
        assert dist.get_process_group_ranks(made) == [0]
        x = torch.ones(2)
        dist.all_reduce(x, group=made)
        dist.destroy_process_group(made)
        assert (private.group_exists(made), private.group_exists(everyone)) == (False, True)


if ALONE:
    tests = {name: each for name, each in list(globals().items()) if name.startswith("test_")}
    for name, test in tests.items():
        test()
        print(f"passed: {name}")
    print(f"torch {torch.__version__}: {len(tests)} passed")
