"""Normalisations over all nodes, in several configurations each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch_geometric.nn as pyg
from torch import nn

from tests.graph.batches import GRAPHS, derivatives
from varcomm.graph import global_norm

C = 4


@dataclass(frozen=True)
class Norm:
    """How to make a module, what it takes besides x, and the features of a node."""

    make: Callable[[], nn.Module]
    takes: str = "nothing"
    features: tuple[int, ...] = (C,)

    def arguments(self, given):
        return {
            "nothing": (),
            "batch": (given.batch,),
            "batch and size": (given.batch, GRAPHS),
            "kinds": (given.kinds,),
        }[self.takes]


NORMS = {}


def norm(name, make, *takes, features=(C,)):
    for what in takes or ("nothing",):
        suffix = f", {what}" if takes else ""
        NORMS[name + suffix] = Norm(make, what, features)


BATCHES = ("nothing", "batch", "batch and size")

norm("BatchNorm1d", lambda: nn.BatchNorm1d(C))
norm("BatchNorm1d sequences", lambda: nn.BatchNorm1d(C), features=(C, 3))
norm("BatchNorm1d plain", lambda: nn.BatchNorm1d(C, affine=False, eps=0.1))
norm("BatchNorm1d without bias", lambda: nn.BatchNorm1d(C, bias=False))
norm("BatchNorm1d untracked", lambda: nn.BatchNorm1d(C, track_running_stats=False))
norm("BatchNorm1d cumulative", lambda: nn.BatchNorm1d(C, momentum=None))
norm("BatchNorm", lambda: pyg.BatchNorm(C, momentum=0.3))
norm("BatchNorm single", lambda: pyg.BatchNorm(C, allow_single_element=True))
norm("DiffGroupNorm", lambda: pyg.DiffGroupNorm(C, groups=3, lamda=0.5))
norm("DiffGroupNorm untracked", lambda: pyg.DiffGroupNorm(C, 2, track_running_stats=False))
norm("HeteroBatchNorm", lambda: pyg.HeteroBatchNorm(C, 4), "kinds")
norm("HeteroBatchNorm cumulative", lambda: pyg.HeteroBatchNorm(C, 3, momentum=None), "kinds")
norm(
    "HeteroBatchNorm plain",
    lambda: pyg.HeteroBatchNorm(C, 3, affine=False, track_running_stats=False),
    "kinds",
)
norm("InstanceNorm", lambda: pyg.InstanceNorm(C), *BATCHES)
norm(
    "InstanceNorm tracked",
    lambda: pyg.InstanceNorm(C, affine=True, track_running_stats=True),
    *BATCHES,
)
norm("GraphNorm", lambda: pyg.GraphNorm(C), *BATCHES)
norm("GraphNorm heads", lambda: pyg.GraphNorm(C), *BATCHES, features=(2, C))
norm("LayerNorm", lambda: pyg.LayerNorm(C), *BATCHES)
norm("LayerNorm plain", lambda: pyg.LayerNorm(C, affine=False), *BATCHES)
norm("PairNorm", lambda: pyg.PairNorm(), *BATCHES)
norm("PairNorm scaled", lambda: pyg.PairNorm(2.5, eps=0.1), *BATCHES)
norm("PairNorm individually", lambda: pyg.PairNorm(2.5, scale_individually=True), *BATCHES)
norm("MeanSubtractionNorm", lambda: pyg.MeanSubtractionNorm(), *BATCHES)
norm("MeanSubtractionNorm heads", pyg.MeanSubtractionNorm, *BATCHES, features=(2, C))
norm("GraphSizeNorm", lambda: pyg.GraphSizeNorm(), *BATCHES)


def made(name, training=True):
    """A module whose parameters are not what they start from."""
    torch.manual_seed(0)
    module = NORMS[name].make().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.rand_like(parameter)
    return module.train(training)


def on(module, graph):
    module.forward = global_norm(module, graph)
    return module


def applied(name, module, given, total):
    """Call a module twice, so that running statistics move twice; then differentiate."""
    x = given.x.clone().requires_grad_()
    more = NORMS[name].arguments(given)

    def run():
        module((1 + x.detach() / 2), *more)
        return module(x, *more)

    leaves = [x, *module.parameters()]
    return derivatives(run, leaves, lambda out: total(out.sin() * given.weight), total)


def buffers(module):
    # PyG assigns those of InstanceNorm with their graph
    return {key: value.detach().clone() for key, value in module.named_buffers()}


def names(*kinds):
    """Return the cases of some classes."""
    return [name for name in NORMS if type(NORMS[name].make()).__name__ in kinds]
