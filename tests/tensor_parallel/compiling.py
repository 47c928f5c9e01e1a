"""Compile something, and compare it with itself uncompiled."""

from functools import partial

import torch
import torch._inductor.pattern_matcher  # at the first compilation, each rank would import it
from torch._dynamo.backends.registry import lookup_backend
from torch.utils import _pytree as pytree

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def leaf(x, dtype=torch.float64):
    return x.detach().to(dtype, copy=True).requires_grad_()


class Compiled:
    """A function as one graph, however often it is called, and how many graphs were made of it."""

    def __init__(self, fn, backend="aot_eager", **options):
        self.graphs, inner = 0, lookup_backend(backend)

        def counted(graph, inputs):
            self.graphs += 1
            return inner(graph, inputs)

        torch._dynamo.reset()
        self._fn = torch.compile(fn, fullgraph=True, backend=counted, **options)

    def __call__(self, *args):
        return self._fn(*args)


def together(fns, x):
    """What functions of `x` return, by their names."""
    return {name: fn(x) for name, fn in fns.items()}


def pulled(fn, x, parameters=()):
    """What `fn` returns, and gradients of a loss that all ranks call alike."""
    result = fn(x)
    asked = [t for t in (x, *parameters) if t.requires_grad]
    outputs = [t for t in pytree.tree_leaves(result) if t is not None]
    loss = sum(output.sin().sum() for output in outputs)
    return result, torch.autograd.grad(loss, asked) if asked and loss.requires_grad else ()


def compare(failures, name, fns, x, parameters=(), bound=EXACT, **options):
    """Note where functions of `x` and their gradients are others when compiled, in one graph."""
    with failures.named(name):
        compiled, parameters = Compiled(partial(together, fns), **options), list(parameters)
        got, of_compiled = pulled(compiled, x, parameters)
        assert compiled.graphs == 1, f"{compiled.graphs} graphs"
        expected, gradients = pulled(partial(together, fns), x, parameters)
        for word in fns:
            with failures.named(name, word):
                assert pytree.tree_structure(got[word]) == pytree.tree_structure(expected[word])
                torch.testing.assert_close(
                    pytree.tree_leaves(got[word]), pytree.tree_leaves(expected[word]), **bound
                )
        torch.testing.assert_close(of_compiled, gradients, **bound)


def compare_layers(failures, name, layers, x, **options):
    """The same for modules, and all their parameters."""
    parameters = [p for layer in layers.values() for p in layer.parameters()]
    compare(failures, name, layers, x, parameters, **options)
