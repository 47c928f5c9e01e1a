"""``Field``: a tensor that is split over ranks and carries how, on which torch's functions run.

Each function of torch has a rule, or it is refused by name. A rule computes with local tensors,
from the rows that :mod:`.fetch` gets. Values that every rank has whole are fields without splits;
parts of them are used on each rank, so a gradient is the sum of those of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from varcomm._torch_private import WithoutDispatch, version_of
from varcomm.errors import ArgumentError
from varcomm.grid.fetch import span
from varcomm.grid.layout import Layout, Split
from varcomm.ops.all_gather_v import all_gather_v
from varcomm.ops.all_to_all_v import transpose_v
from varcomm.ops.broadcast import broadcast
from varcomm.ops.gather_v import gather_v
from varcomm.sharding import Box, Sharded
from varcomm.transport.group import Group, resolve

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}  # by names of torch's functions
_OF_SEVERAL: set[str] = set()  # names whose rules take further operands that are split
_NAMED: dict[Rule, set[str]] = {}  # parameters of rules that do not take any keyword


def rule(*names: str, several: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of functions of torch, given as words of texts.

    With `several`, any operand may be split, else only the first.
    """

    def register(of: Rule) -> Rule:
        known = " ".join(names).split()
        assert not RULES.keys() & {*known}
        RULES.update(dict.fromkeys(known, of))
        parameters = inspect.signature(of).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            named = {n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}
            _NAMED[of] = named
        _OF_SEVERAL.update(known if several else ())
        return of

    return register


_ASKED = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"


def by_body(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function of torch that is written in Python: the functions that it calls have rules.

    The copy of the function does not ask its arguments how to run it.
    """
    space = func.__globals__ | dict.fromkeys(_ASKED, lambda *_: False)
    body = FunctionType(func.__code__, space, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body(*args, **kwargs)


class Field(torch.Tensor):
    """A tensor that is split over the ranks of a grid.

    Made by :meth:`Grid.field` and :meth:`Grid.scatter`, and by torch's functions of fields.
    ``shape`` and ``size()`` are those of one process.

    Attributes
    ----------
    grid_layout : Layout
        Its ``splits``, one per split dimension: ``dim`` (-1 is the last), ``sizes`` on all ranks,
        and ``start``, the first row of this rank.

    See Also
    --------
    Grid, functions

    Notes
    -----
    Communication: that of the functions that it is passed to; an exchange along a dimension takes
    a message per neighbour.
    In one process: a tensor.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     grid = varcomm.grid.Grid((3, 2))
    ...     x = grid.field(torch.full((len(grid.ranges[0]), 2), rank + 1.0))
    ...     return tuple(x.shape), tuple(x.local.shape), x.cumsum(0).gather()[:, 0].tolist()
    >>> varcomm.launch(fn, 2)
    [((3, 2), (2, 2), [1.0, 2.0, 4.0]), ((3, 2), (1, 2), [1.0, 2.0, 4.0])]
    """

    is_placeholder = True  # for collectives, which take the part of a rank
    instead = "Pass the part of this rank, field.local."
    # of fetched rows, which torch would return as a view: the field's memory, and its changes then
    copied: tuple[Tensor, int] | None = None
    written: list[Tensor] | None = None  # of a rank without rows: values written into views
    grid_layout: Layout

    @property
    def local(self) -> Tensor:
        """The rows of this rank as an ordinary tensor, in the same memory and autograd graph."""
        return plain(self)  # type: ignore[no-any-return]

    @cached_property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape on one process."""
        return torch.Size(self.grid_layout.shape(plain(self).shape))

    def gather(
        self,
        dim: int | None = None,
        index: Tensor | None = None,
        *,
        dst: int | None = None,
        sparse_grad: bool = False,
    ) -> Tensor:
        """Return the whole tensor on rank `dst`, or with None on all ranks; collective.

        `dst` counts the ranks of the grid, row by row of a mesh. On other ranks the result has zero
        rows and belongs to autograd's graph.

        With `dim` and `index`, the call is ``torch.gather`` of the field, and returns a field.
        """
        if (dim is None) != (index is None) or (dst is not None and dim is not None):
            raise ArgumentError(
                "field.gather() returns the whole tensor on all ranks, field.gather(dst=rank) on "
                "one; field.gather(dim, index) is torch's function. Pass dst= alone, or both dim "
                "and index."
            )
        if dim is not None:
            return torch.gather(self, dim, index, sparse_grad=sparse_grad)  # type: ignore[arg-type]
        x = self.local
        roots = ranks_of(self.grid_layout, 0 if dst is None else dst)
        for split in reversed(self.grid_layout.splits):
            x = whole(x, x.dim() + split.dim, split, None if dst is None else roots[split.group])
        return x

    def sharded(self) -> Sharded:
        """Return this rank's part with its place, in the same memory, to save or load it.

        ``varcomm.checkpoint`` also takes the field itself; torch.distributed.checkpoint takes this.
        """
        local, offsets = plain(self), [0] * self.dim()
        for split in self.grid_layout.splits:
            if split.repeats > 1:
                raise refused("a checkpoint of rows of several images in one dimension")
            offsets[split.dim] = split.start
        return Sharded(self.shape, [Box(tuple(offsets), local)], local.dtype, self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Apply the rule of a function."""
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "get grad":
            gradient = untraced(func, args, kwargs)
            return None if gradient is None else wrap(gradient, _of_gradient(name, args[0]))
        if name == "register_hook":
            layout, hook = _of_gradient(name, args[0]), args[1]
            _ = args[0].grad_fn  # torch crashes if a write into a view has just changed it
            args = args[0], lambda gradient: plain(hook(wrap(gradient, layout)))
        if name.endswith("_like") and kwargs.get("requires_grad"):  # a leaf, not a view of one
            made = cls.__torch_function__(func, types, args, kwargs | {"requires_grad": False})
            return made.requires_grad_()
        if name in _OF_THE_TENSOR or name.startswith(("get _", "set _")):
            args = [args[0], *map(plain, args[1:])]  # autograd adds to a gradient that is set
            return untraced(func, args, kwargs)
        given = [*fields(args), *fields(kwargs.values())]
        found = RULES.get(name)
        kwargs = {_WORDS.get(word, word): value for word, value in kwargs.items()}
        target: Any = args[0] if args else kwargs.get("input")
        in_place = name[-1] == "_" != name[0]
        writes = in_place or name in _WRITES or kwargs.get("inplace") is True
        if writes and isinstance(target, Field) and target.copied:
            raise refused(
                f"{name} on rows that were fetched, which are no view of the field,",
                "Compute a new field: torch.where, or a product with a mask.",
            )
        if writes and target is not None and not isinstance(target, Field):
            return _written(func, given[0].grid_layout, args, kwargs)
        if kwargs.get("inplace") is True and getattr(target, "written", None) is not None:
            rest = {word: value for word, value in kwargs.items() if word != "input"}
            out = func(target.clone(), *args[1:], **rest | {"inplace": False})
            return target.copy_(out)  # backward of `func` reads the clone
        if found is None or name not in _ALSO_WHOLE:
            layout = given[0].grid_layout
            if not any(one.grid_layout.splits for one in given):
                if found is None and (name in _TURN or name.startswith("set ")):
                    raise refused(f"{name} of a value that every rank has", "Compute a new one.")
                if name in _RANDOM and layout.ranks > 1:
                    return _drawn_alike(name, func, layout, args, kwargs)
                out = func(*map_plain(args), **{k: map_plain(v) for k, v in kwargs.items()})
                out = target if in_place else wrap(out, layout)
                return _copied(name, given[0], out)
            if found is None:
                raise refused(name)
            if kwargs.get("out") is not None:
                raise refused(f"{name} with out=")
            kwargs.pop("out", None)  # torch.norm passes None
            if "input" in kwargs and "condition" not in kwargs:
                args = (kwargs["input"], *args)
                kwargs = {word: value for word, value in kwargs.items() if word != "input"}
            if found in _NAMED:
                args, kwargs = _by_place(args, kwargs, _NAMED[found])
            if name not in _OF_SEVERAL:
                first, *others = args
                if any(x.grid_layout.splits for x in fields([*others, *kwargs.values()])):
                    raise refused(f"{name} with an operand behind the first that is split")
                args = first, *map_plain(others)
                kwargs = {word: map_plain(value) for word, value in kwargs.items()}
        try:
            with _drawing(name, given[0], kwargs) if name in _DRAW else nullcontext():
                out = found(func, *args, **kwargs)
        except TypeError:
            try:
                inspect.signature(found).bind(func, *args, **kwargs)
            except TypeError as error:
                raise refused(f"{name} with these arguments ({error})") from None
            raise
        return _copied(name, given[0], out)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        """Refuse an operator that has not asked for a rule: it would compute with a part."""
        raise ArgumentError(
            f"{func} would compute with this rank's part of a field. torch.func, torch.vmap, "
            "torch.jit.script and torch.tensor hand it on. Call the functions of torch, "
            "torch.autograd.grad and clone() instead, or pass field.local for the part."
        )

    def __tensor_flatten__(self) -> Any:
        """Refuse torch.compile, which asks this of its arguments."""
        raise ArgumentError("fields run eagerly: call the model without torch.compile.")

    __tensor_unflatten__ = __tensor_flatten__

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError(
            "a field is split over ranks and cannot be pickled. Save it with "
            "varcomm.checkpoint, or save field.gather(dst=0)."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        splits = "; ".join(f"dim {s.dim} in {list(s.sizes)}" for s in self.grid_layout.splits)
        return f"Field({tuple(self.shape)}, {splits or 'whole'}, local={plain(self)!r})"


def _of_gradient(name: str, x: Field) -> Layout:
    """Return the layout of a field's gradient, which is split as the field is."""
    if x.grid_layout.ranks > 1 and not x.grid_layout.splits:
        raise refused(
            f"{name} of a value that every rank has",
            "Its gradient here is the part of this rank: torch.autograd.grad sums them.",
        )
    return x.grid_layout


# packages such as opt_einsum choose how to compute by the first word of a class's module
Field.__module__ = f"torch.{__name__}"


def untraced(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with fields as they are, on which no rule is applied."""
    return super(Field, Field).__torch_function__(func, (Field,), args, kwargs)


# answered by the tensor itself, without communication
_OF_THE_TENSOR = {
    "dim", "ndimension", "is_floating_point", "is_complex", "is_signed", "is_contiguous",
    "element_size", "get_device", "requires_grad_", "retain_grad", "register_hook",
    "register_post_accumulate_grad_hook", "data_ptr", "storage", "untyped_storage",
    "is_inference", "is_conj", "is_neg", "is_pinned", "hash", "set requires_grad", "set grad",
    *(f"get {name}" for name in (
        "grad_fn", "requires_grad", "is_leaf", "dtype", "device", "layout", "ndim", "is_cuda",
        "is_cpu", "is_xpu", "is_mps", "is_sparse", "is_quantized", "is_meta", "is_nested",
        "itemsize", "retains_grad", "names", "output_nr",
    )),
}  # fmt: skip

_WORDS = {"axis": "dim", "keepdims": "keepdim"}  # which torch accepts for NumPy's sake
# names of parameters that rules take by their place, in the order of places
_PLACES = (
    "dims", "size", "shape", "sizes", "repeats", "split_size_or_sections", "split_size",
    "split_sizes", "chunks",
    "indices_or_sections", "sections", "indices", "tensor1", "tensor2", "mat1", "mat2", "batch1",
    "batch2", "vec", "other", "ord", "upscale_factor", "downscale_factor",
)  # fmt: skip


def _by_place(
    args: Sequence[Any], kwargs: dict[str, Any], names: set[str]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return arguments of which those that a rule has under another name are positional."""
    moved = [word for word in _PLACES if word in kwargs and word not in names]
    rest = {word: value for word, value in kwargs.items() if word not in moved}
    return (*args, *(kwargs[word] for word in moved)), rest


_WRITES = {"setitem", "iand", "ior"}
_TURN = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_"}
_VIEWS = frozenset((
    "getitem", "select", "narrow", "view", "reshape", "flatten", "unflatten", "permute",
    "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "squeeze", "unsqueeze",
    "expand", "expand_as", "broadcast_to", "view_as", "split", "chunk", "unbind", "tensor_split",
    "detach", "get T", "get mT", "get H", "get mH", "get data",
))  # fmt: skip
_DROPS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"}
_RANDOM = _DROPS | {
    "alpha_dropout", "feature_alpha_dropout", "rand_like", "randn_like", "randint_like",
    "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "multinomial", "rrelu",
    "poisson", "normal", "gumbel_softmax",
}  # fmt: skip
# dropout of channels drops the same ones on all ranks
_DRAW = (_RANDOM - _DROPS) | {"dropout", "dropout_", "scaled_dot_product_attention"}


@contextmanager
def _drawing(name: str, x: Field, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let each rank draw other numbers, from a seed that all ranks draw from equal generators.

    The generators are equal again afterwards, although ranks have drawn for as many rows as they
    have: what is drawn next for an ordinary tensor is the same on all ranks.
    """
    layout, given = x.grid_layout, kwargs.get("generator")
    draws = name != "scaled_dot_product_attention" or kwargs.get("dropout_p")
    device = plain(x).device
    # a CUDA graph replays with a state of the generator of its own, which a capture cannot set
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not draws or not layout.splits or captured:
        yield
        return
    where = "cpu" if given is None else given.device
    seed = int(torch.randint(2**62, (), generator=given, device=where))
    for group in layout.groups:
        seed = seed * group.size % 2**62 + group.rank
    if given is not None:
        kwargs["generator"] = torch.Generator(where).manual_seed(seed)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield


def _copied(name: str, source: Field, out: Any) -> Any:
    """Let views of fetched rows be known as such, and those of no rows as views of one field."""
    for one in fields([out]) if name in _VIEWS else ():
        one.copied = one.copied or source.copied
        if not one.copied and name != "detach":
            one.written = source.written
    return out


def alias(out: Any, of: Any) -> Any:
    """Return the result of a function that returned its argument: writes into one change both."""
    if isinstance(of, Field):
        out.copied, out.written = of.copied, of.written
    return out


def _drawn_alike(
    name: str, func: Callable[..., Any], layout: Layout, args: Sequence[Any], kwargs: Any
) -> Any:
    """Drop the same elements of a value on all ranks, which have it whole."""
    more = "Draw on one rank, and vc.broadcast; or use dropout."
    if name not in _DROPS or kwargs.pop("inplace", False):
        raise refused(f"{name} of a value that every rank has, on which draws differ,", more)
    x, rest = plain(kwargs.pop("input") if "input" in kwargs else args[0]), args[1:] if args else ()
    mask = func(torch.ones_like(x), *rest[:2], **kwargs).detach()
    for group in layout.groups:
        mask = broadcast(mask, group=group.process_group)
    return wrap(x * mask, layout)


_ALSO_WHOLE = {"backward", "grad", "size", "deepcopy", "setitem"}  # rules also without splits


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch; of a method of Python, without underscores."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        of: Any = getattr(func, "__self__", func)
        return f"{name.strip('_')} {of.__name__}"
    of_module = getattr(func, "__module__", None) == "torch.nn.functional"  # _threshold
    private = name.startswith("__") or of_module or "upsample" in name
    short = name.strip("_") if private else name
    return (
        name if short in ("float", "int", "bool", "complex", "index") and short != name else short
    )


def refused(what: str, more: str = "") -> ArgumentError:
    """Return the error of a function that has no rule."""
    if what.startswith("_nested_tensor"):
        more = "Encoders of torch ask for it in evaluation: pass enable_nested_tensor=False."
    more = more or (
        "Write it with functions that have one (varcomm.grid.functions() lists them), or "
        "gather the whole tensor on every rank: field.gather()."
    )
    return ArgumentError(f"{what} has no rule on a field that is split over ranks. {more}")


def ranks_of(layout: Layout, place: int) -> dict[Group, int]:
    """Return the rank in each group of the rank that is counted over a mesh row by row."""
    if place not in range(layout.ranks):
        raise ArgumentError(f"a grid of {layout.ranks} ranks has no rank {place!r}.")
    found = {}
    for group in reversed(layout.groups):
        place, found[group] = divmod(place, group.size)
    return found


def plain(value: Any) -> Any:
    """Return the local tensor of a field, and any other value as it is."""
    if not isinstance(value, Field):
        return value
    if value.copied and value.copied[1] != version_of(value.copied[0]):
        raise refused(
            "rows that were fetched, which are no view, of a field that was written into since",
            "Select them again.",
        )
    with WithoutDispatch():
        x = value.as_subclass(Tensor)
    return x + sum(value.written) if value.written else x


def copy_of(x: Field) -> tuple[Tensor, int]:
    """Return the memory of which fetched rows are a copy, and the number of changes to it."""
    with WithoutDispatch():
        of = x.as_subclass(Tensor).detach()
    return of, version_of(of)


def write(func: Callable[..., Any], x: Field, *args: Any, **kwargs: Any) -> None:
    """Call a function that writes into the rows of a rank.

    Where a gradient without elements passes a view, torch drops it from the graph, and a second
    derivative leaves out the messages behind it. So the values that a rank without rows writes are
    added to what it reads; their sums are zeros.
    """
    if x.written is not None:
        before = plain(x)
        func(after := before.clone(), *args, **kwargs)
        if after.requires_grad:  # of the values before, too
            x.written[:] = [before.sum() + after.sum()]
    with WithoutDispatch():
        func(x.as_subclass(Tensor), *args, **kwargs)


def map_plain(value: Any, of: Callable[[Any], Any] = plain) -> Any:
    """Return local tensors in place of fields, also in lists and tuples."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        parts = [map_plain(one, of) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return of(value)


def gathered(value: Any) -> Any:
    """Return a field whole, and any other value as it is."""
    return value.gather() if isinstance(value, Field) else value


_COUNTS = "grid: a backward that began with a field runs"


@contextmanager
def counting_once(values: Sequence[Any]) -> Iterator[None]:
    """Let gradients leave ordinary tensors with fields, if a backward begins with fields alone."""
    state = resolve(None).auxiliary
    before, state[_COUNTS] = state.get(_COUNTS), all(isinstance(x, Field) for x in values)
    try:
        yield
    finally:
        state[_COUNTS] = before


def _written(func: Callable[..., Any], layout: Layout, args: Any, kwargs: dict[str, Any]) -> Any:
    """Write fields into an ordinary tensor, full on every rank, as Fourier networks do.

    A loss of ordinary tensors is equal on all ranks, so its gradient would count once per rank:
    backward refuses it.
    """

    def check(_: Tensor) -> None:
        if not resolve(None).auxiliary.get(_COUNTS):
            raise ArgumentError(
                "a field was written into an ordinary tensor, and the loss is an ordinary tensor "
                "too: its gradient would count once per rank. Call grid.mean(loss).backward()."
            )

    def written(value: Any) -> Any:
        x = gathered(value)
        if not isinstance(value, Field) or layout.ranks == 1 or not torch.is_grad_enabled():
            return x
        if x.requires_grad:
            x.register_hook(check)
        elif value.grid_layout.splits:
            raise refused(
                "writing a field without a gradient into an ordinary tensor",
                "Use torch.cat, torch.stack or torch.where, or write field.gather().",
            )
        return x

    out = func(*map_plain(args, written), **{k: map_plain(v, written) for k, v in kwargs.items()})
    return out if out is None else wrap(out, layout.having({}, 0))


def wrap(out: Any, layout: Layout) -> Any:
    """Let a tensor carry its layout, also those of a tuple or list."""
    if isinstance(out, Tensor):
        local = plain(out)
        made = local.as_subclass(Field)
        made.grid_layout = layout
        if not local.numel():
            made.written = []
        return made
    if isinstance(out, list | tuple) and not isinstance(out, torch.Size):
        parts = [wrap(one, layout) for one in out]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    return out


def fields(values: Any) -> Iterator[Field]:
    """Yield the fields among values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Field):
            yield value
        elif isinstance(value, list | tuple):
            yield from fields(value)


def common(values: Sequence[Any]) -> Layout:
    """Return the layout of an element-wise result: along each dimension, of the first operand."""
    found: dict[int, Split] = {}
    given = [*fields(values)]
    for split in (split for one in given for split in one.grid_layout.splits):
        known = found.get(split.dim)
        if known is None or known.total == 1:
            found[split.dim] = split
    for dim, split in [*found.items()]:
        if split.total == 1 and any(
            isinstance(v, Tensor) and v.dim() >= -dim and v.shape[dim] != 1 for v in values
        ):
            del found[dim]  # a row that every rank gets
    groups: set[Group] = set()
    for dim, split in [*found.items()]:
        if split.group in groups:
            del found[dim]  # its ranks already share another dimension
        groups.add(split.group)
    return given[0].grid_layout.having(found, 0)


def placed(value: Any, layout: Layout) -> Any:
    """Return this rank's part of an operand in an element-wise function of this layout.

    An ordinary tensor is one that every rank has whole.
    """
    if not isinstance(value, Tensor):
        return map_plain(value)
    x: Tensor = plain(value)
    own = value.grid_layout.by_dim if isinstance(value, Field) else {}
    targets = {dim: split for dim, split in layout.by_dim.items() if -dim <= x.dim()}
    same = {dim for dim, s in own.items() if dim in targets and targets[dim].group == s.group}
    turned = set()
    for dim in sorted(own.keys() - same):  # first: ranks of its group may get different parts
        split, size = own[dim], x.dim()
        to = next((t for t in targets.values() if t.group == split.group), split)
        if to.dim in own or split.repeats * to.repeats > 1 or x.shape[to.dim] != to.total:
            x = whole(x, size + dim, split)
            continue
        group = split.group.process_group
        x = transpose_v(x, size + to.dim, to.sizes, size + dim, split.sizes, group)
        turned.add(to.dim)
    for dim, target in targets.items():
        if dim in turned:
            continue
        if dim not in same:
            x = part(x, target)
        elif own[dim].sizes != target.sizes or own[dim].repeats != target.repeats:
            x = _aligned(x, own[dim], target)
    return x


def part(x: Tensor, split: Split) -> Tensor:
    """Return this rank's rows of a tensor that every rank has whole, or that is broadcast."""
    dim = split.dim
    if x.shape[dim] == 1 != split.total:
        return x
    if x.shape[dim] != split.total:
        raise ArgumentError(
            f"a field has {split.total} rows along dimension {dim}, and meets an ordinary tensor "
            f"of shape {tuple(x.shape)}, which must have them all, or one. Make a field of a "
            "rank's own rows: grid.field(local)."
        )
    if split.repeats == 1:
        return x.narrow(dim, split.start, split.own)
    at = x.dim() + dim
    rows = x.unflatten(at, (split.repeats, split.rows)).narrow(at + 1, split.start, split.own)
    joined: Tensor = rows.flatten(at, at + 1)
    return joined


def _aligned(x: Tensor, split: Split, target: Split) -> Tensor:
    if split.total == 1:
        return span(x, split, [(0, min(rows, 1)) for rows in target.sizes])
    if split.total != target.total:
        raise ArgumentError(
            f"fields of {split.total} and {target.total} rows along dimension {split.dim} meet. "
            "Pad, slice or interpolate one of them to the size of the other: "
            "torch.nn.functional.interpolate(x, size=y.shape[2:])."
        )
    if split.repeats != target.repeats:
        raise refused("an operation on rows of several images in one dimension, split differently")
    at = x.dim() + split.dim
    rows = x.unflatten(at, (split.repeats, split.own))
    return span(rows, split, target.spans).flatten(at, at + 1)


def whole(x: Tensor, dim: int, split: Split, dst: int | None = None) -> Tensor:
    """Gather a split dimension of a local tensor on a rank of its group, or on every one."""
    group = split.group.process_group
    if split.repeats > 1:
        rows = x.unflatten(dim, (split.repeats, split.own))
        once = replace(split, repeats=1)
        return whole(rows, dim + 1, once, dst).flatten(dim, dim + 1)
    if dst is None:
        return all_gather_v(x, split.sizes, dim=dim, group=group)
    return gather_v(x, split.sizes, dim=dim, dst=dst, group=group)


def filled(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return a local tensor with a row of zeros along dimensions that have none.

    With it a rank without rows calls torch's functions, and takes part in backward.
    """
    empty = [x.shape[dim] == 0 and dim in dims for dim in range(-1, -x.dim() - 1, -1)]
    return F.pad(x, [n for e in empty for n in (0, int(e))]) if any(empty) else x


def place_of(dim: int, dims: int) -> int:
    """Return a dimension counted from the first of `dims`; torch's error if there is none."""
    most = max(dims, 1)
    if not -most <= dim < most:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got "
            f"{dim})"
        )
    return dim % most


def split_of(x: Field, dim: int, name: str = "") -> Split | None:
    """Return the split of a dimension; a function that is named is refused for several images."""
    split = x.grid_layout.by_dim.get(place_of(dim, x.dim()) - x.dim())
    if name and split is not None and split.repeats > 1:
        raise refused(f"{name} along rows of several images in one dimension")
    return split


def dims_of(value: Any, x: Field) -> list[int]:
    """Return dimensions counted from the first; None and an empty sequence mean all of them."""
    dims = [value] if isinstance(value, int) else value or range(x.dim())
    return [place_of(dim, x.dim()) for dim in dims]
