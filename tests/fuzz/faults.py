"""Random calls in which one rank deviates in one argument."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from hypothesis import strategies as st

import varcomm
from tests.fuzz.programs import POOL, settings_of
from tests.ops.primitives import PRIMITIVES, Setting

KINDS = (
    *("dtype", "size", "row", "dim", "root", "operation", "requires_grad", "not a tensor"),
    *("sizes of another length", "out of range"),
)
ROOTED = {"gather_v", "scatter_v", "reduce", "broadcast"}
WITHOUT_SIZES = {"all_reduce", "reduce", "broadcast"}
NAMES = sorted(name for name in PRIMITIVES if hasattr(varcomm, name))
# Arguments of non-root ranks that are ignored, because the root decides.
OF_ROOT = {
    "broadcast": ("dtype", "requires_grad", "row", "size"),
    "scatter_v": ("dtype", "requires_grad", "row"),
}


@dataclass(frozen=True)
class Fault:
    """A call, the rank that deviates, and the argument."""

    name: str
    setting: Setting
    culprit: int
    kind: str


@st.composite
def drawn(draw, pool=POOL):
    s = draw(settings_of(pool))
    s = Setting((*s.sizes[:-1], 1 + s.sizes[-1]), 0, (2, 3), s.root)
    name, culprit = draw(st.sampled_from(NAMES)), draw(st.integers(0, pool - 1))
    return Fault(name, s, culprit, draw(st.sampled_from(KINDS)))


def call_of(name, setting, rank):
    shape = PRIMITIVES[name](setting).shapes[rank]
    x = torch.zeros((2,) if shape is None else shape)
    return lambda: PRIMITIVES[name](setting).bind()(x)


def deviating(fault):
    """Return the call of the culprit, or None if the operation has no such argument."""
    s, name, kind = fault.setting, fault.name, fault.kind
    case = PRIMITIVES[name](s)
    shape, has_sizes = case.shapes[fault.culprit], name not in WITHOUT_SIZES
    if kind == "operation":
        other = "all_reduce" if name != "all_reduce" else "reduce"
        return lambda: PRIMITIVES[other](s).bind()(torch.zeros(s.whole))
    if kind == "root" and name in ROOTED:
        return call_of(name, replace(s, root=(s.root + 1) % s.ranks), fault.culprit)
    if kind == "dim" and has_sizes:
        return call_of(name, replace(s, dim=1), fault.culprit)
    if kind in ("root", "dim", *OF_ROOT.get(name, ())) or shape is None or name == "shard_v":
        return None
    if (name, kind) == ("indexed_all_to_all_v", "size"):
        return None  # rows without an index are accepted
    x = torch.zeros(shape)
    given = {
        "not a tensor": lambda: [1, 2],
        "dtype": x.double,
        "requires_grad": x.requires_grad_,
        "row": lambda: torch.zeros(*shape[:-1], shape[-1] + 1),
        "size": lambda: torch.zeros(shape[0] + 1, *shape[1:]),
    }
    if kind in given:
        return lambda: case.bind()(given[kind]())
    if not has_sizes or name in ("indexed_all_to_all_v", "transpose_v"):
        return None
    wrong, is_length = getattr(varcomm, name), kind == "sizes of another length"
    if name == "all_to_all_v":
        counts = [0] * (s.ranks - is_length), [0] * s.ranks
        return lambda: wrong(x, *counts, dim=0 if is_length else 7)
    return lambda: wrong(x, [*s.sizes, *[0] * is_length], dim=0 if is_length else 7)


def on_ranks(rank, fault):
    """Make the call in debug(); return the error, and whether the group still works."""
    call = deviating(fault)
    if call is None:
        return None
    if rank != fault.culprit:
        call = call_of(fault.name, fault.setting, rank)
    said = ""
    try:
        with varcomm.debug(20):
            call()
    except varcomm.VarcommError as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    one = varcomm.all_reduce(torch.tensor(1)).item()
    return said, one == dist.get_world_size()


def verdict(fault, answers):
    """Return the defect in the answers of all ranks, or ""."""
    if answers[0] is None:
        return ""
    said, works = zip(*answers, strict=True)
    if not all(works):
        return "the group does not work any more"
    if "" in said:
        return f"not an error on ranks {[r for r, text in enumerate(said) if not text]}: {said}"
    others = {text for rank, text in enumerate(said) if rank != fault.culprit}
    if len(others) > 1:
        return f"ranks raise different errors: {others}"
    kinds = {text.split("rank")[0].split(":")[0] for text in said}
    return "" if len(kinds) <= 2 else f"{kinds}"
