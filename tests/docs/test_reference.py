"""What is documented is what is exported, each name once."""

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"
ROOMS = (
    "varcomm",
    "varcomm.checkpoint",
    "varcomm.data_parallel",
    "varcomm.graph",
    "varcomm.models",
    "varcomm.sharding",
    "varcomm.simulate",
    "varcomm.tensor_parallel",
    "varcomm.testing",
)
# documented where they are, since they are no names of a room
FURTHER = {"varcomm.models.generation.generate"}

_DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:data):: (\S+)$", re.MULTILINE)
_AGAIN = re.compile(r":py:obj:`(\S+) <(\S+)>`")


def documented():
    """Each documented name, in full; and those that are said to be of another page, with it."""
    found, again = [], {}
    for page in REFERENCE.glob("*.rst"):
        text = page.read_text()
        room = re.search(r"^\.\. currentmodule:: (\S+)$", text, re.MULTILINE)
        for name in _DIRECTIVE.findall(text):
            found.append(name if name.startswith("varcomm.") else f"{room[1]}.{name}")
        again |= dict(_AGAIN.findall(text))
    return found, again


def test_documented_is_exported():
    exported = {
        f"{room}.{name}" for room in ROOMS for name in importlib.import_module(room).__all__
    }
    found, again = documented()
    assert [name for name, times in Counter(found).items() if times > 1] == []
    assert set(found) | set(again) == exported | FURTHER


@pytest.mark.parametrize(("name", "there"), documented()[1].items())
def test_what_is_said_to_be_elsewhere_is_the_same(name, there):
    def of(path):
        room, _, last = path.rpartition(".")
        return getattr(importlib.import_module(room), last)

    assert of(name) is of(there)
    assert there in documented()[0]


def test_rooms_are_all_there():
    varcomm = importlib.import_module("varcomm")
    assert {f"varcomm.{room}" for room in varcomm._ROOMS} | {"varcomm"} == set(ROOMS)
