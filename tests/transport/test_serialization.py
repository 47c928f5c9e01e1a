"""Plain values arrive unchanged; everything else is refused."""

import json
import math

import pytest
import torch

from tests.transport.groups import ordered_group
from tests.worlds import on_ranks
from varcomm.transport.agreement import all_gather_object
from varcomm.transport.group import resolve
from varcomm.transport.serialization import from_bytes, to_bytes

VALUE = {
    "list": [None, True, -3, 2**70, 0.5, "é", b"\x00\xff", []],
    ("a", 1): ({1, 2}, torch.bfloat16, {}, ()),
    2: {"a": {0: [(1,), [{3}], 2 - 3j, torch.device("cpu")]}},
}


def test_values():
    assert repr(from_bytes(to_bytes(VALUE))) == repr(VALUE)


def test_values_that_json_lacks():
    assert math.isnan(from_bytes(to_bytes(math.nan)))
    assert from_bytes(to_bytes([math.inf, -math.inf])) == [math.inf, -math.inf]
    assert from_bytes(to_bytes("\ud800")) == "\ud800", "a lone surrogate, which no encoding has"
    for tensor in (
        torch.zeros(0, 4),
        torch.arange(6.0).view(2, 3).T,
        torch.rand(5).bfloat16(),
        torch.rand(2, dtype=torch.complex128).conj(),
        torch.ones(2, requires_grad=True),
    ):
        found = from_bytes(to_bytes([tensor]))[0]
        assert (found.dtype, found.requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert torch.equal(found, tensor)


def of_tensor(shape, device="cpu"):
    return {"tensor": [{"dtype": "float32"}, {"tuple": shape}, device, False, {"bytes": ""}]}


MALFORMED = [
    *({"eval": "1"}, {"os.system": ["true"]}, {"tuple": 3}, {"tuple": [], "set": []}, {}),
    *({"dtype": "load"}, {"dtype": "nothing"}, {"dtype": ["float32"]}),
    *(of_tensor([0], device) for device in ("meta", "privateuseone", "cuda", "", None, ["cpu"])),
    of_tensor([10**12]),
]


def test_refusals(monkeypatch):
    for value in (object(), print, [torch.nn.Linear(1, 1)], {"a": {1: range(2)}}):
        with pytest.raises(TypeError, match="is not a plain value"):
            to_bytes(value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    texts = [json.dumps(value).encode() for value in MALFORMED]
    for data in (*texts, b"", b"\x80\x04N.", b"[1", b"nothing"):
        with pytest.raises(ValueError, match="is not a plain value"):
            from_bytes(data)


# Length of a text that, with the length before it, just fits one message.
FITS = 1024 - 8 - len(to_bytes("." * 1000)) + 1000


@on_ranks(1, 3)
def test_values_of_all_ranks(rank, ranks):
    """In one message per rank, or in two if one value is long."""
    for some in ((0, 0, 0), (FITS, 5, FITS), (FITS, FITS + 1, 0), (100_000, FITS + 1, 30_000)):
        found = all_gather_object(str(rank) * some[rank], resolve(None))
        assert found == [str(r) * some[r] for r in range(ranks)]
    pair = ordered_group([2, 1]) if ranks == 3 else None
    if rank:
        found = all_gather_object({"text": "x" * 2000 * rank}, resolve(pair))
        assert found == [{"text": "x" * 4000}, {"text": "x" * 2000}]
