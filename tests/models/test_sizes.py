"""Sizes of which a model cannot be made; those of GPT are tested with it."""

import re

import pytest

from varcomm.errors import ArgumentError
from varcomm.models import EncodeProcessDecode, GraphTransformer, MeshGraphNet, PaiNN

SIZES = {
    MeshGraphNet: "in_channels edge_channels out_channels hidden_channels",
    EncodeProcessDecode: "grid_channels mesh_channels edge_channels out_channels hidden_channels",
    GraphTransformer: "in_channels edge_channels out_channels hidden_channels num_heads "
    "mlp_channels",
    PaiNN: "num_types hidden_channels radial_size",
}
CASES = [(model, name) for model, names in SIZES.items() for name in names.split()]
FURTHER = {PaiNN: {"cutoff": 1.0}}


@pytest.mark.parametrize("wrong", [0, -3, 1.0, True, "4"])
@pytest.mark.parametrize(("model", "name"), CASES)
def test_sizes_are_positive(model, name, wrong):
    sizes = of(model)
    message = f"{model.__name__}: {name} must be a whole number from 1 on, got {wrong!r}."
    with pytest.raises(ArgumentError, match=re.escape(message)):
        model(**sizes | {name: wrong})
    assert sum(p.numel() for p in model(**sizes).parameters()) > 0


def of(model):
    return dict.fromkeys(SIZES[model].split(), 2) | FURTHER.get(model, {}) | {"num_blocks": 1}


@pytest.mark.parametrize("wrong", [-1, 1.0, True])
@pytest.mark.parametrize("model", SIZES)
def test_blocks_are_counted(model, wrong):
    message = f"{model.__name__}: num_blocks must be a whole number from 0 on, got {wrong}"
    with pytest.raises(ArgumentError, match=message):
        model(**of(model) | {"num_blocks": wrong})
    few, more = (model(**of(model) | {"num_blocks": n}) for n in (0, 1))
    assert len(list(few.parameters())) < len(list(more.parameters()))


@pytest.mark.parametrize("cutoff", [0, -1.0, float("nan"), float("inf")])
def test_a_cutoff_is_a_length(cutoff):
    with pytest.raises(
        ArgumentError, match=f"PaiNN: cutoff must be a positive length, got {cutoff}"
    ):
        PaiNN(1, cutoff, hidden_channels=2, num_blocks=1)
