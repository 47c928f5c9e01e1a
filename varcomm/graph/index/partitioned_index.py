"""Index vectors of a partitioned graph, which know what their numbers stand for.

``graph.edge_index``, ``graph.batch`` and ids of other groups of nodes are
:class:`PartitionedIndex`: tensors of integers that carry the edges or the groups that they belong
to. Results of operations on them carry it too.
If such a vector selects or reduces rows, the operation is that on the full graph:

- ``x[row]`` at the sources of edges fetches the halo, ``scatter_add_(0, row, ...)`` returns the
  parts of halo rows to their owners;
- a reduction by ids of groups is over the nodes of all ranks.

PyG's functions are made of these operations, so they are exact wherever they are called. An
operation that would take the local numbers for those of the full graph raises ArgumentError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self, TypeAlias

import torch

from varcomm._torch_private import unpack_by_unbind
from varcomm.errors import ArgumentError
from varcomm.ops.checks import holds_values
from varcomm.transport.group import Group

# Meaning of the numbers: pairs of a source and a target, or the other way around; nodes at the
# source or target of edges; groups of nodes; which edges are self loops, and which are not;
# numbers computed from local ones, which select nothing.
Kind = Literal["edges", "reversed", "source", "target", "group", "loops", "no loops", "computed"]
How = Literal["sum", "amax", "amin", "prod"]
Known: TypeAlias = tuple[tuple[torch.Tensor, torch.Tensor], ...]
Rule: TypeAlias = Callable[..., Any]

# Rules by the name of the function of torch, and what compiled code finds: rules and names by the
# function itself. varcomm/graph/index/torch_functions.py fills them.
RULES: dict[str, Rule] = {}
RULES_OF_FUNCTIONS: dict[Rule, Rule] = {}
NAMES: dict[Rule, str] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Return a decorator: the rule is that of all functions and methods of torch with these names.

    A rule takes the function and its arguments, of which at least one is a vector.
    """

    def register(function: Rule) -> Rule:
        for name in names.split():
            RULES[name] = function
            for named in functions_named(name):
                NAMES[named], RULES_OF_FUNCTIONS[named] = name, function
        return function

    return register


def functions_named(name: str) -> set[Rule]:
    """Return the functions and methods of torch with a name."""
    owners = (torch, torch.Tensor, torch.nn.functional)
    named = (getattr(owner, name, None) for owner in owners)
    return {function for function in named if callable(function)}


class Numbering:
    """The edges or the groups that numbers stand for: EdgeRules or NodeGroups."""

    group: Group

    # for kinds of edges alone
    start_at_targets: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
    at_targets: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_up_to_last: Callable[[int], bool]
    check_has_loops: Callable[[], None]
    positions_of_loops: Callable[[bool, torch.Tensor], torch.Tensor | slice]
    check_loops: Callable[[torch.Tensor], torch.Tensor]

    # for groups alone
    size: int
    of_size: Callable[[int], Numbering]

    def selected_from(self, kind: Kind, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the rows that numbers of this kind select from, given those of this rank."""
        raise NotImplementedError

    def reduced(
        self, index: PartitionedIndex, how: How, src: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """Reduce rows of `src` to the nodes or groups of `index`, over all ranks.

        `start` has a row for each. An extreme of no values is that of the start, or 0 of groups.
        """
        raise NotImplementedError

    def count(self, kind: Kind, index: torch.Tensor, whole: bool) -> int:
        """Return the number of nodes or groups that the ids refer to, as in one process."""
        raise NotImplementedError


class Marked(torch.Tensor):
    """A tensor of integers that carries their meaning; `plain` is an ordinary one of them."""

    plain: torch.Tensor

    def on(self, device: torch.device | str) -> Self:
        """Return the same numbers, with their meaning, on another device."""
        raise NotImplementedError


class PartitionedIndex(Marked):
    """A tensor of local numbers that carries what they stand for.

    Attributes
    ----------
    plain : torch.Tensor
        The numbers as an ordinary tensor in the same memory: local ids, or ids of groups.
    of : EdgeRules or NodeGroups
        The edges or groups to which the numbers refer.
    kind : str
        Which of its numbers they are.
    line : torch.Tensor or None
        The numbers along one dimension, before they were viewed or expanded.
    whole : bool
        Whether this is the complete vector of this rank: for masks and parts of it, counts are not
        kept and compiled code does not know the number of self loops.
    known : tuple of pairs of torch.Tensor
        Rows of owned nodes, and the same with the halo's: what sources select from, fetched before.
    """

    is_placeholder = True  # local ids, which other ranks would read as their own
    instead = "It means the ids of this rank only: pass graph.owned_ids, or edges.local_ids."

    of: Numbering
    kind: Kind
    line: torch.Tensor | None
    whole: bool
    known: Known

    @staticmethod
    def make(
        plain: torch.Tensor,
        of: Numbering,
        kind: Kind,
        whole: bool = False,
        line: torch.Tensor | None = None,
        known: Known = (),
    ) -> PartitionedIndex:
        """Let a tensor of numbers carry what these stand for."""
        if (
            type(plain) is not torch.Tensor
            and not torch.compiler.is_compiling()
            and not holds_values(plain)
        ):
            raise ArgumentError(
                f"edges of a partitioned graph cannot be of type {type(plain).__name__}. "
                "Record the model with torch.compile or make_fx."
            )
        out = plain.as_subclass(PartitionedIndex)
        out.plain, out.of, out.kind, out.whole = plain, of, kind, whole
        out.line, out.known = plain if plain.dim() == 1 else line, known
        return out

    def on(self, device: torch.device | str) -> PartitionedIndex:
        """Return the same numbers, with their meaning, on another device."""
        return PartitionedIndex.make(self.plain.to(device), self.of, self.kind, self.whole)

    def knowing(self, known: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> PartitionedIndex:
        """Return the same numbers beside rows that have been fetched for their sources."""
        own = self.plain, self.of, self.kind, self.whole, self.line
        return PartitionedIndex.make(*own, known=tuple(known))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry on what the numbers stand for; select and reduce as on the full graph."""
        # compiled code is traced instruction by instruction: this is kept short for that
        if torch.compiler.is_compiling():
            rule = RULES_OF_FUNCTIONS.get(func)
        else:
            rule = RULES.get(getattr(func, "__name__", ""))
        if not kwargs:
            return other(func, args, {}) if rule is None else rule(func, *args)
        if kwargs.get("out") is not None:
            given = first_index(*args, *kwargs.values())
            more = "Do not pass out=. Take k_hop_subgraph of the data before graph.partition."
            raise refuse(func, given.kind, more)
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        return other(func, args, kwargs) if rule is None else rule(func, *args, **kwargs)

    def __copy__(self) -> PartitionedIndex:
        return PartitionedIndex.make(self.plain, self.of, self.kind, self.whole, self.line)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedIndex:
        return PartitionedIndex.make(self.plain.clone(), self.of, self.kind, self.whole)

    def tolist(self) -> Any:
        """Refuse: torch would return the local numbers without a call of the rules."""
        raise refuse(torch.Tensor.tolist, self.kind)


unpack_by_unbind(PartitionedIndex)


def _of_plain(name: str) -> property:
    return property(lambda index: getattr(index.plain, name))


# read without __torch_function__, whose call costs more, above all while it is compiled
for _name in ("shape", "dtype", "device", "layout", "is_cuda", "ndim"):
    setattr(Marked, _name, _of_plain(_name))
# as methods, because compiled code cannot trace these attributes of a subclass
for _name, _method in {"T": "t", "mT": "t", "data": "detach"}.items():
    setattr(Marked, _name, property(getattr(torch.Tensor, _method)))


def plain(value: Any) -> Any:
    """Return an ordinary tensor of marked integers, and any other value as it is."""
    return value.plain if isinstance(value, Marked) else value


def refuse(func: Callable[..., Any], kind: str, more: str = "") -> ArgumentError:
    """Return the error of an operation that has no meaning for numbers of this kind."""
    name = name_of(func).strip("_").replace("reduce_ex", "pickling") or "this operation"
    what = {
        "computed": "numbers computed from local ids of a partitioned graph",
        "group": "ids of groups of a partitioned graph",
    }.get(kind, "edges of a partitioned graph")
    more = more or (
        "It would mean the ids of this rank only. Take values at nodes by x[edge_index[0]] or "
        "graph.with_halo, values of groups by PyG's pools, global ids by graph.owned_ids and "
        "graph.halo_ids, and local ids as an ordinary tensor by graph.edges.local_ids. Make other "
        "ids of groups by //, +, * and % with an int, or by unique(return_inverse=True). If a "
        "function needs all rows of a group, as medians and to_dense_batch do, pass rows of all "
        "ranks: graph.gather(x) and graph.gather(graph.batch.plain)."
    )
    return ArgumentError(f"{name} is not known on a part of a graph for {what}. {more}")


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch; compiled code finds it by the function alone."""
    if torch.compiler.is_compiling():
        return NAMES.get(func, "")
    return getattr(func, "__name__", "")


def other(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute with local numbers: integers that result select nothing, and floats are refused."""
    out = fresh(func, *args, **kwargs)
    return computed(func, out, first_index(*args, *kwargs.values()))


def fresh(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a tensor with other values, or a text."""
    values = {name: unwrapped(value) for name, value in kwargs.items()}
    return func(*[unwrapped(one) for one in args], **values)


def first_index(*values: Any) -> PartitionedIndex:
    """Return the first vector among these and in lists of them."""
    for value in values:
        parts = value if isinstance(value, list | tuple) else (value,)
        for part in parts:
            if isinstance(part, PartitionedIndex):
                return part
    raise AssertionError


def unwrapped(value: Any) -> Any:
    """Return ordinary tensors in place of marked ones, also in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([plain(one) for one in value])
    return plain(value)


def computed(func: Callable[..., Any], out: Any, given: PartitionedIndex) -> Any:
    """Return results that mark integers as computed from numbers, or raise ArgumentError."""
    if isinstance(out, list | tuple) and not isinstance(out, torch.Size):
        parts = [computed(func, one, given) for one in out]
        return parts if isinstance(out, list) else tuple(parts)
    if not isinstance(out, torch.Tensor):
        return out
    if given.kind in ("loops", "no loops"):
        if out.dim() == 0 and given.plain.dim() > 0:
            raise refuse(func, given.kind)  # whether this rank has self loops
        return out
    if out.dtype == torch.bool and (given.kind == "group" or out.dim() == 0):
        return out
    if out.is_floating_point() or out.is_complex() or out.dtype == torch.bool:
        raise refuse(func, given.kind)
    return PartitionedIndex.make(out, given.of, "computed")


def ordinary(value: Any, kind: type[torch.Tensor]) -> Any:
    """Return ordinary tensors in place of those of a subclass, also in lists and tuples."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([ordinary(one, kind) for one in value])
    return value.as_subclass(torch.Tensor) if isinstance(value, kind) else value
