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
    """Raise inside debug() if parameters that were equal on all ranks at an earlier loss differ.

    A metric that is computed without gradients is no loss.
    """
    if not debugging() or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    known = group.auxiliary.setdefault("parameters of losses", {})
    leaves = (getattr(node, "variable", None) for node in nodes_of(loss))
    trained = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
    own = [(str(tuple(each.shape)), repr(digest(each))) for each in trained]
    shared = share("parameters of a loss", lambda: own, group)
    ranks = [[(shape, values) for shape, values in each] for each in shared]
    counts = [Counter(shape for shape, _ in each) for each in ranks]
    everywhere = {s: n for s, n in counts[0].items() if all(each[s] == n for each in counts)}
    common = reduce(and_, map(Counter, ranks))  # graphs of ranks may have another order
    differ = Counter(s for s, _ in (Counter(own) - common).elements() if s in everywhere)
    # a parameter that differs from the first belongs to one rank, as a table of owned rows
    more = differ - known.setdefault(frozenset(everywhere.items()), differ)
    if more:
        words = " and ".join(sorted(more))
        raise DisagreementError(
            f"{more.total()} of {len(own)} parameters of a loss, of shape {words}, no longer have "
            "the same values on all ranks. Call vc.data_parallel.sum_gradients(model) after every "
            "backward, before the optimizer's step."
        )
