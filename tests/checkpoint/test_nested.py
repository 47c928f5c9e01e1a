import pytest

from varcomm import ArgumentError
from varcomm.checkpoint.nested import at, nested


def test_lists_within_lists():
    flat = {("a", 1, "b"): 2, ("a", 0, 1): 1, ("a", 0, 0): 0, ("c",): {}}
    assert nested(flat) == {"a": [[0, 1], {"b": 2}], "c": {}}


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({("a",): {}, ("a", "b"): 1}, r"^'a.b' lies within something that is no container"),
        ({("a", "b"): 1, ("a",): 5}, r"^'a' is both a value and a container"),
    ],
)
def test_what_is_a_value_and_a_container(flat, message):
    with pytest.raises(ArgumentError, match=message):
        nested(flat)


def test_what_is_at_a_place():
    tree = {"a": [{"b": None}], "c": 5}
    assert at(tree, ("a", 0)) == {"b": None}
    assert at(tree, ("a", 0, "b"), 7) is None
    for path in (("a", 1), ("c", "d"), ("x",), ("a", "b")):
        assert at(tree, path, 7) == 7
