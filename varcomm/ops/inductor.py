"""Keep the order of communication in what Inductor generates.

Other ranks wait for what a rank calls, so all have to call the same in the same order. A graph says
so: each of our operators takes the token that the one before has given. Inductor drops tokens, and
is to order the operators by dependencies of its own instead. Up to torch 2.13 it writes these down
under the names of buffers and looks them up under those of operations, so that they have no effect,
and two ranks whose shards differ wait for each other in different places. Here they are written
down under the names under which they are looked up. In torch 2.15 that is mended.
"""

from __future__ import annotations

import sys
from typing import Any

from torch._library.effects import EffectType
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

__all__ = ["keep_order"]

_known: set[OpOverload] = set()


def keep_order(operator: OpOverload) -> None:
    """Let Inductor lower an operator in order, if it is there; else it lowers none."""
    if operator in _known or "torch._inductor.lowering" not in sys.modules:
        return
    _known.add(operator)
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    def wrapped(x: Any) -> Any:
        return x.wrap_for_lowering() if isinstance(x, ir.IRNode) else x

    @register_lowering(operator, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        first = len(V.graph.operations)
        result = pytree.tree_map(wrapped, ir.FallbackKernel.create(operator, *args, **kwargs))
        before = V.graph.effectful_ops.get(EffectType.ORDERED)
        looked_up = getattr(V.graph, "additional_star_deps", None)  # gone where it is mended
        if before is not None and looked_up is not None:
            for made in V.graph.operations[first:]:
                looked_up[made.get_operation_name()].add(before.get_name())
        return result
