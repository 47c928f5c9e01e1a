"""Suites of the primitives, of plans, and of calls inside debug().

Bytes of plans are the mean of sent bytes over ranks. In "halo", a grid is cut into strips, and each
rank sends the column next to its neighbour. "halo_with_own" appends the received rows to the rank's
rows. In "random", each rank sends half as many rows as it owns, drawn with repetition.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from suite.floors import schedules
from suite.peers import PEERS, CannotError, anemoi_halo, entered
from suite.task import FLOOR, OURS, PEER, Contender, Layout, Task, contender, reference, tolerance

import varcomm as vc

# The primitive of each operation, and of its adjoint.
PRIMITIVES = {
    "all_gather_v": ("all_gather", "reduce_scatter"),
    "reduce_scatter_v": ("reduce_scatter", "all_gather"),
    "all_to_all_v": ("all_to_all", "all_to_all"),
    "gather_v": ("gather", "scatter"),
    "scatter_v": ("scatter", "gather"),
    "indexed_all_to_all_v": ("pick_rows", "sum_rows"),
}
PLANS = ("halo", "halo_with_own", "random")


def build(case, peers, device):
    """Prepare a primitive or a plan on this rank."""
    layout = Layout.of(case, dist.get_rank(), device)
    forward, adjoint = PRIMITIVES.get(case.operation, ("pick_rows", "sum_rows"))
    x, expected = reference(forward, layout, "x")
    gradient, moved, primitive = None, layout, forward
    if case.backward:
        moved, primitive = layout.transposed(), adjoint
        gradient, expected = reference(adjoint, moved, "gradient")
    ours, _ = layout.call(case.operation)
    floors = schedules(case.engine, primitive, moved)
    found, cannot = [], {}
    if case.operation == "halo_with_own":
        plan = ours
        ours = lambda x: torch.cat([x, plan(x)])  # noqa: E731
        wrapped = partial(bare_backward, layout.mine) if case.backward else bare_forward
        floors = {name: partial(wrapped, way) for name, way in floors.items()}
        if case.backward:
            own = layout.values(layout.rank, layout.mine, "own")
            expected = (own.double() + expected.double()).to(layout.dtype)
            gradient = torch.cat([own, gradient])
        else:
            expected = torch.cat([x, expected])
        if peers:
            found, cannot = appending(layout, x, gradient)
    elif peers:
        is_plan = case.operation in PLANS
        asked = replace(case, operation="indexed_all_to_all_v") if is_plan else case
        found, cannot = entered(asked, layout, x, gradient)
    given = x if gradient is None else gradient
    return Task(
        [
            contender(OURS, OURS, ours, x, gradient),
            *(Contender(name, FLOOR, partial(way, given)) for name, way in floors.items()),
            *found,
        ],
        expected,
        tolerance(case) if primitive in ("reduce_scatter", "sum_rows") else 0.0,
        *(layout.nbytes(case.operation), layout.skew, moved.fewest(), cannot),
    )


def bare_forward(way, x):
    """Append the received rows to the rank's rows."""
    return torch.cat([x, way(x)])


def bare_backward(mine, way, gradient):
    """Add the returned rows to the gradient of the rank's rows."""
    return way(gradient[mine:]).add_(gradient[:mine])


def appending(layout, x, gradient):
    """Return the peer that appends to own rows, and the reasons of the others."""
    cannot = {name: "appends nothing to own rows" for name in PEERS if name != "anemoi"}
    try:
        exchange = anemoi_halo(layout)
    except CannotError as error:
        return [], cannot | {"anemoi": str(error)}
    return [contender("anemoi", PEER, exchange, x, gradient)], cannot


def build_debug(case, peers, device):
    """Prepare a primitive inside debug(); the floor is the call outside."""
    task = build(case, False, device)
    call = task.contenders[0].run

    def compared():
        with vc.debug():
            return call()

    outside = Contender("outside debug()", FLOOR, call)
    return task._replace(contenders=[Contender(OURS, OURS, compared), outside])
