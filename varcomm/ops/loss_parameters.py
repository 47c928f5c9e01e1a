"""Parameters of a loss, compared between ranks inside debug(): a forgotten sum lets them drift."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any

import torch

from varcomm.errors import DisagreementError
from varcomm.ops.digest import digest
from varcomm.transport.agreement import share
from varcomm.transport.debug import debugging
from varcomm.transport.group import Group

_EVERY = 10  # calls between comparisons


def nodes_of(value: torch.Tensor) -> Iterator[Any]:
    """Return the nodes of autograd's graph below a value, in an order that the graph fixes."""
    left, seen = [value.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)
            yield node


def compare_parameters(loss: torch.Tensor, group: Group) -> None:
    """Raise inside debug() if parameters that were equal on all ranks differ, at every tenth loss.

    A metric that is computed without gradients is no loss.
    """
    if not debugging() or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    known = group.auxiliary.setdefault("parameters of losses", {"calls": 0})
    known["calls"] += 1
    if known["calls"] % _EVERY != 1:
        return
    leaves = (getattr(node, "variable", None) for node in nodes_of(loss))
    own = [repr(digest(leaf)) for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
    ranks = share("parameters of a loss", lambda: own, group)
    if any(len(other) != len(own) for other in ranks):
        return
    common = reduce(and_, map(Counter, ranks))  # graphs of ranks may have another order
    differ = len(own) - common.total()
    # a parameter that differs from the first belongs to one rank, as a table of owned rows
    first = known.setdefault(len(own), differ)
    if differ > first:
        raise DisagreementError(
            f"{differ - first} of {len(own)} parameters of a loss no longer have the same values "
            "on all ranks. Call vc.data_parallel.sum_gradients(model) after every backward, "
            "before the optimizer's step."
        )
