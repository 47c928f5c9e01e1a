"""What one rank does in a step: counted while it runs, in a world that is only planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varcomm.errors import GroupError
from varcomm.simulate.meter import Meter
from varcomm.transport.engines import peers_answer
from varcomm.transport.group import resolve
from varcomm.transport.simulated import Transfer, transfers
from varcomm.transport.trace import Call, Trace, trace

__all__ = ["Work", "count"]


@dataclass(frozen=True)
class Work:
    """What one rank computes, keeps and moves in a step.

    Attributes
    ----------
    flops : int
        Floating-point operations of matrix products, convolutions and attention.
    matmul_bytes, other_bytes : int
        Bytes that these, and all other operators, read and write.
    kernels : int
        Operators that touch memory, each a kernel on a GPU.
    memory : int
        Bytes of tensors alive at the worst moment: those that the step uses and those it makes.
    calls : Trace
        What :func:`varcomm.trace` counts.
    transfers : tuple of (str, Transfer)
        What the engine was asked for, by the operation that asked.

    Examples
    --------
    >>> import torch, varcomm
    >>> x, weight = torch.zeros(4, 3), torch.zeros(3, 2)
    >>> with varcomm.simulate.world(2, rank=0):
    ...     work = varcomm.simulate.count(lambda: varcomm.all_reduce(x @ weight))
    >>> work.flops, work.matmul_bytes, work.calls.total.sent
    (48, 104, 32)
    """

    flops: int
    matmul_bytes: int
    other_bytes: int
    kernels: int
    memory: int
    calls: Trace
    transfers: tuple[tuple[str, Transfer], ...]


def count(step: Callable[[], object]) -> Work:
    """Run `step` once in the simulated world that this process is in, and count what it does.

    Run it once before, if the first time does more than those after it, as making the state of an
    optimizer.

    Parameters
    ----------
    step : callable
        Without arguments: a forward, a backward, an update, or whatever is to be counted.

    Returns
    -------
    Work
        Of this rank.

    Raises
    ------
    GroupError
        Outside of :func:`world`.

    Examples
    --------
    >>> import torch, varcomm as vc
    >>> with vc.simulate.world(64):
    ...     layer, x = torch.nn.Linear(1000, 1000), torch.ones(10, 1000)
    ...     def step():
    ...         layer(x).sum().backward()
    ...         vc.data_parallel.sum_gradients(layer)
    ...     work = vc.simulate.count(step)
    >>> work.flops, work.calls.total.messages_sent
    (40000000, 126)
    """
    group = resolve(None)
    if group.size > 1 and peers_answer(group):
        raise GroupError(
            f"simulate.count on {group}: the other ranks are there. Call it inside simulate.world; "
            "varcomm.trace counts what real ranks send."
        )
    with Meter() as meter, trace() as calls, transfers() as found:
        step()
    totals = meter.totals
    return Work(
        totals.flops,
        totals.matmul_bytes,
        totals.other_bytes,
        totals.kernels,
        meter.before + meter.peak,
        calls,
        tuple(_named(calls, found)),
    )


def _named(calls: Sequence[Call], found: Sequence[Transfer]) -> list[tuple[str, Transfer]]:
    """Say which operation asked for each transfer: that of the next call with its bytes."""
    named, rest = [], iter(calls)
    for transfer in found:
        name = next(call.name for call in rest if _is_of(call, transfer))
        named.append((name, transfer))
    return named


def _is_of(call: Call, transfer: Transfer) -> bool:
    return call.sent == sum(transfer.send) and call.received == sum(transfer.recv)
