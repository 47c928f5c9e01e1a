"""Calls in which one rank deviates in one argument, of every kind that there is."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from hypothesis import strategies as st

import varcomm
from tests.fuzz.programs import POOL, settings_of
from tests.ops.primitives import PRIMITIVES, Setting

# what there is to be wrong about a call of a primitive
KINDS = (
    "dtype",
    "size",
    "row",
    "dim",
    "root",
    "operation",
    "requires_grad",
    "not a tensor",
    "sizes of another length",
    "out of range",
)
ROOTED = {"gather_v", "scatter_v", "reduce", "broadcast"}
WITHOUT_SIZES = {"all_reduce", "reduce", "broadcast"}
NAMES = sorted(set(PRIMITIVES) - {name for name in PRIMITIVES if "plan" in name or "adj" in name})


@dataclass(frozen=True)
class Fault:
    """Which call, who deviates, and in what."""

    name: str
    setting: Setting
    culprit: int
    kind: str


@st.composite
def faults(draw):
    """Draw a faulty call; whether it is one may depend on sizes."""
    setting = draw(settings_of(POOL))
    setting = Setting((*setting.sizes[:-1], 1 + setting.sizes[-1]), 0, (2, 3), setting.root)
    return Fault(
        draw(st.sampled_from(NAMES)),
        setting,
        draw(st.integers(0, POOL - 1)),
        draw(st.sampled_from(KINDS)),
    )


def deviating(fault):
    """Return the call of the culprit, or None where this call has nothing of the kind."""
    s, name = fault.setting, fault.name
    case = PRIMITIVES[name](s)
    shape = case.shapes[fault.culprit]
    x = torch.zeros((2,) if shape is None else shape)
    op = case.bind
    if fault.kind == "operation":
        other = "all_reduce" if name != "all_reduce" else "reduce"
        return lambda: PRIMITIVES[other](s).bind()(torch.zeros(s.whole))
    if fault.kind == "not a tensor":
        return None if shape is None or name == "shard_v" else lambda: op()([1, 2])
    if fault.kind == "root":
        moved = replace(s, root=(s.root + 1) % POOL)
        given = PRIMITIVES[name](moved).shapes[fault.culprit]
        if name not in ROOTED:
            return None
        return lambda: PRIMITIVES[name](moved).bind()(torch.zeros(given or (2,)))
    if fault.kind == "dim":
        if name in WITHOUT_SIZES:
            return None
        turned = Setting(s.sizes, 1, s.rest, s.root)
        given = PRIMITIVES[name](turned).shapes[fault.culprit]
        return lambda: PRIMITIVES[name](turned).bind()(torch.zeros(given or (2,)))
    if shape is None or name == "shard_v":
        return None
    of_root = {"broadcast": ("dtype", "requires_grad", "row", "size")}
    of_root["scatter_v"] = ("dtype", "requires_grad", "row")
    if fault.kind in of_root.get(name, ()):  # what the root has is what all get
        return None
    if fault.kind == "dtype":
        return lambda: op()(x.double())
    if fault.kind == "requires_grad":
        return lambda: op()(x.requires_grad_())
    if fault.kind == "row":
        return lambda: op()(torch.zeros(*shape[:-1], shape[-1] + 1))
    if fault.kind == "size" and name == "indexed_all_to_all_v":
        return None  # rows that no index names are no fault
    if fault.kind == "size":
        return lambda: op()(torch.zeros(shape[0] + 1, *shape[1:]))
    wrong = getattr(varcomm, name)
    if name in WITHOUT_SIZES or name in ("indexed_all_to_all_v", "transpose_v"):
        return None
    if fault.kind == "out of range":
        if name == "all_to_all_v":
            return lambda: wrong(x, [0] * POOL, [0] * POOL, dim=7)
        return lambda: wrong(x, list(s.sizes), dim=7)
    if name == "all_to_all_v":
        return lambda: wrong(x, [0] * (POOL - 1), [0] * POOL)
    return lambda: wrong(x, [*s.sizes, 0])


def on_ranks(rank, fault):
    """Make the call in debug(); what all ranks say, and whether they still work together."""
    call = deviating(fault)
    if call is None:
        return None
    case = PRIMITIVES[fault.name](fault.setting)
    if rank != fault.culprit:
        shape = case.shapes[rank]
        x = torch.zeros((2,) if shape is None else shape)
        call = lambda: case.bind()(x)  # noqa: E731
    said = ""
    try:
        with varcomm.debug(20):
            call()
    except varcomm.VarcommError as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    one = varcomm.all_reduce(torch.tensor(1)).item()
    return said, one == dist.get_world_size()


def verdict(fault, answers):
    """Say what is wrong about what ranks answered, if anything is."""
    if answers[0] is None:
        return ""
    said, works = zip(*answers, strict=True)
    if not all(works):
        return "the group does not work any more"
    told = {text.split("rank")[0].split(":")[0] for text in said}
    if "" in said:
        return f"not an error on ranks {[r for r, text in enumerate(said) if not text]}: {said}"
    others = {text for rank, text in enumerate(said) if rank != fault.culprit}
    if len(others) > 1:
        return f"ranks say different things: {others}"
    return "" if len(told) <= 2 else f"{told}"
