"""Compile something, and compare it with itself uncompiled."""

import torch
from torch._dynamo.backends.registry import lookup_backend

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def drawn(seed, *shape, dtype=torch.float64):
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


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


def pulled(fn, x, parameters=()):
    """The result, and gradients of what is differentiated, from a loss that all ranks call alike."""
    result = fn(x)
    outputs = result if isinstance(result, tuple) else (result,)
    asked = [t for t in (x, *parameters) if t.requires_grad]
    loss = sum(output.sin().sum() for output in outputs)
    gradients = torch.autograd.grad(loss, asked) if asked and loss.requires_grad else ()
    return outputs, gradients


def compare(failures, name, fn, x, parameters=(), bound=EXACT, **options):
    """Note where `fn` of `x` and its gradients are others when compiled, in one graph."""
    with failures.named(name):
        parameters = list(parameters)
        expected = pulled(fn, x, parameters)
        compiled = Compiled(fn, **options)
        torch.testing.assert_close(pulled(compiled, x, parameters), expected, **bound)
        assert compiled.graphs == 1, f"{compiled.graphs} graphs"
