"""Modules whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from varcomm.sharding import ShardSpec, mark, shard_spec
from varcomm.transport.group import GroupLike, resolve

__all__ = ["ShardedModule", "param_is_not_tensor_parallel_duplicate"]

_MARKS = "_varcomm_shard_specs"


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor, group: GroupLike = None) -> bool:
    """Tell whether this rank counts a parameter, so that over all ranks each element counts once.

    True for a sharded one on every rank, and for a replicated one on the group's first rank.

    Parameters
    ----------
    param : torch.Tensor
        A parameter; sharded if :func:`shard_spec` says so.
    group : ProcessGroup or DeviceMesh, optional
        The ranks that take part; None is the whole world.

    Returns
    -------
    bool
        Whether sums over parameters are to count it on this rank.

    Notes
    -----
    Communication: none.

    In one process: true of all parameters.

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.tensor_parallel.sharding import param_is_not_tensor_parallel_duplicate
    >>> bias = torch.nn.Parameter(torch.zeros(4))
    >>> varcomm.launch(lambda rank: param_is_not_tensor_parallel_duplicate(bias), 2)
    [True, False]
    """
    return shard_spec(param) is not None or resolve(group).rank == 0


class ShardedModule(torch.nn.Module):
    """A module that marks its parameters anew where torch replaces them.

    :func:`copy.deepcopy` and ``to_empty`` make new parameters of the old ones, and
    ``load_state_dict(..., assign=True)`` takes others in their place.
    """

    def _marks(self) -> dict[str, ShardSpec]:
        named = self._parameters.items()
        specs = {name: shard_spec(param) for name, param in named if param is not None}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def _mark(self, marks: dict[str, ShardSpec]) -> None:
        for name, spec in marks.items():
            param = self._parameters[name]
            if param is not None:
                mark(param, spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, _MARKS: self._marks()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop(_MARKS)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark(marks)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        marks = self._marks()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark(marks)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        marks = self._marks()
        super()._load_from_state_dict(*args, **kwargs)
        self._mark(marks)
