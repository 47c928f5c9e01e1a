"""The suite of :func:`varcomm.debug`: what it costs that ranks compare a call before data move.

The call itself, outside, is what is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

import varcomm as vc
from varcomm.cli.bench.case import FLOOR, OURS, Case, Contender, Task
from varcomm.cli.bench.suites import ops
from varcomm.cli.bench.timing import Effort

__all__ = ["OPERATIONS", "build"]

OPERATIONS = ops.OPERATIONS

T = TypeVar("T")


def build(case: Case, effort: Effort, device: torch.device) -> Task:
    """Prepare a case on this rank."""
    task = ops.build(case, replace(effort, peers=False), device)
    (call,) = (contender.run for contender in task.contenders if contender.kind == OURS)
    contenders = [
        Contender(OURS, OURS, partial(_compared, call)),
        Contender("outside debug()", FLOOR, call),
    ]
    return replace(task, contenders=contenders)


def _compared(call: Callable[[], T]) -> T:
    with vc.debug():
        return call()
