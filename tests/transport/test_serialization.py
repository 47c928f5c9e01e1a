"""Plain values arrive as they were; everything else is refused."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worlds import WORLDS
from varcomm.transport.agreement import all_gather_object
from varcomm.transport.group import resolve
from varcomm.transport.serialization import from_bytes, to_bytes

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(st.integers()),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.text())), inner),
    ),
    max_leaves=20,
)


def kinds(value):
    if isinstance(value, list | tuple):
        return type(value), [kinds(item) for item in value]
    if isinstance(value, dict):
        return dict, [(kinds(key), kinds(item)) for key, item in value.items()]
    return type(value)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_values_arrive_as_they_were(value):
    found = from_bytes(to_bytes(value))
    assert found == value
    assert kinds(found) == kinds(value)


def test_numbers_that_json_does_not_have():
    assert math.isnan(from_bytes(to_bytes(math.nan)))
    assert from_bytes(to_bytes([math.inf, -math.inf])) == [math.inf, -math.inf]
    assert from_bytes(to_bytes("\ud800")) == "\ud800", "a lone surrogate, which no encoding has"


TENSORS = [
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.arange(6.0).view(2, 3).T,
    torch.rand(5).bfloat16(),
    torch.tensor([True, False]),
    torch.rand(2, dtype=torch.complex128).conj(),
    torch.ones(2, requires_grad=True),
]


def test_tensors():
    for tensor in TENSORS:
        found = from_bytes(to_bytes([tensor]))[0]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.requires_grad == tensor.requires_grad
        assert torch.equal(found, tensor)


class Text(str):
    """Arrives as a plain text."""


@pytest.mark.parametrize(
    "value",
    [object(), print, 1j, [torch.nn.Linear(1, 1)], {"a": {1: range(2)}}],
    ids=["object", "function", "complex", "a module", "inside"],
)
def test_values_that_are_not_plain(value):
    with pytest.raises(TypeError, match="is no plain value"):
        to_bytes(value)
    assert type(from_bytes(to_bytes(Text("a")))) is str


@pytest.mark.parametrize(
    "value",
    [
        {"eval": "1"},
        {"os.system": ["true"]},
        {"tuple": 3},
        {"tuple": [], "set": []},
        {"dtype": "load"},
        {"dtype": "nothing"},
        {"dtype": ["float32"]},
        {"Piece": [1, 2, 3, 4, 5, 6]},
        {"tensor": [{"dtype": "float32"}, {"tuple": [10**12]}, "cpu", False, {"bytes": ""}]},
        {},
    ],
    ids=str,
)
def test_values_that_no_rank_sends(value):
    with pytest.raises(ValueError, match="is no plain value"):
        from_bytes(json.dumps(value).encode())


def empty_on(device):
    parts = {"dtype": "float32"}, {"tuple": [0]}, device, False, {"bytes": ""}
    return json.dumps({"tensor": parts}).encode()


def test_a_device_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("meta", "privateuseone", "cuda", "", None, ["cpu"]):
        with pytest.raises(ValueError, match="there is no device"):
            from_bytes(empty_on(device))


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"[1", b"nothing"])
def test_bytes_of_something_else(data):
    with pytest.raises(ValueError, match="is no plain value"):
        from_bytes(data)


# Of a text that, with its length before it, just fits one message.
FITS = 1024 - 8 - len(to_bytes("." * 1000)) + 1000


def shared(rank, lengths):
    group = resolve(None)
    whole = [all_gather_object(str(rank) * some[rank % 3], group) for some in lengths]
    if group.size == 3:
        pair = dist.new_group([2, 1], sort_ranks=False)
        if rank:
            whole.append(all_gather_object({"text": "x" * 2000 * rank}, resolve(pair)))
        else:
            whole.append(None)
    return whole


@pytest.mark.parametrize("ranks", WORLDS)
def test_values_of_all_ranks(worlds, ranks):
    """In one message of each rank, or in two if one of them is long."""
    lengths = [(0, 0, 0), (FITS, 5, FITS), (FITS, FITS + 1, 0), (100_000, FITS + 1, 30_000)]
    expected = [[str(r) * some[r % 3] for r in range(ranks)] for some in lengths]
    pair = [{"text": "x" * 4000}, {"text": "x" * 2000}]
    for rank, whole in enumerate(worlds.run(ranks, shared, lengths)):
        assert whole[:4] == expected
        assert whole[4:] == ([pair if rank else None] if ranks == 3 else [])
