"""Plain values arrive as they were, and nothing else can be told."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_values_arrive_as_they_were(value):
    found = from_bytes(to_bytes(value))
    assert found == value
    assert kinds(found) == kinds(value)


def test_numbers_that_json_does_not_have():
    assert math.isnan(from_bytes(to_bytes(math.nan)))
    assert from_bytes(to_bytes([math.inf, -math.inf])) == [math.inf, -math.inf]
    assert from_bytes(to_bytes("\ud800")) == "\ud800", "a lone surrogate, which no encoding has"


TENSORS = {
    "a scalar": torch.tensor(3),
    "nothing": torch.zeros(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "bfloat16": torch.rand(5).bfloat16(),
    "bool": torch.tensor([True, False]),
    "complex": torch.rand(2, 2, dtype=torch.complex64),
    "conjugate": torch.rand(2, dtype=torch.complex128).conj(),
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name):
    tensor = TENSORS[name]
    found = from_bytes(to_bytes([tensor]))[0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.requires_grad == tensor.requires_grad
    assert torch.equal(found, tensor)


class Text(str):
    """What it is beyond a text does not travel."""


def test_other_kinds_of_texts_become_texts():
    assert type(from_bytes(to_bytes(Text("a")))) is str


@pytest.mark.parametrize(
    "value",
    [object(), print, 1j, torch.Generator(), [torch.nn.Linear(1, 1)], {"a": {1: range(2)}}],
    ids=["object", "function", "complex", "a generator", "a module", "inside"],
)
def test_what_is_not_plain(value):
    with pytest.raises(TypeError, match="is no plain value"):
        to_bytes(value)


@pytest.mark.parametrize(
    "said",
    [
        {"eval": "1"},
        {"os.system": ["true"]},
        {"tuple": 3},
        {"tuple": [], "set": []},
        {"dtype": "load"},
        {"dtype": "nothing"},
        {"dtype": ["float32"]},
        {"tensor": [{"dtype": "float32"}, {"tuple": [10**12]}, "cpu", False, {"bytes": ""}]},
        {},
    ],
    ids=str,
)
def test_what_was_never_said(said):
    with pytest.raises(ValueError, match="is no plain value"):
        from_bytes(json.dumps(said).encode())


def test_a_name_of_a_dtype_imports_nothing(monkeypatch):
    def found(name):
        raise AssertionError(name)

    monkeypatch.setattr(torch, "__getattr__", found)  # by which torch imports what it is asked for
    with pytest.raises(ValueError, match="'_inductor' is no dtype"):
        from_bytes(b'{"dtype":"_inductor"}')
    assert from_bytes(b'{"dtype":"float8_e4m3fn"}') is torch.float8_e4m3fn


def empty_on(device):
    parts = {"dtype": "float32"}, {"tuple": [0]}, device, False, {"bytes": ""}
    return json.dumps({"tensor": parts}).encode()


@pytest.mark.parametrize("device", ["meta", "privateuseone", "cuda", "xpu", "", None, ["cpu"]])
def test_a_device_that_is_not_here(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no device"):
        from_bytes(empty_on(device))


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"[1", b"nothing", b"[" * 100_000])
def test_bytes_of_something_else(data):
    with pytest.raises(ValueError, match="is no plain value"):
        from_bytes(data)
