"""Sizes that models refuse."""

import pytest

from varcomm.errors import ArgumentError
from varcomm.models import GPT, EncodeProcessDecode, GraphTransformer, MeshGraphNet, PaiNN

SIZES = {
    GPT: "vocab_size hidden_size num_heads num_kv_heads mlp_size",
    MeshGraphNet: "in_channels edge_channels out_channels hidden_channels",
    EncodeProcessDecode: "grid_channels mesh_channels edge_channels out_channels hidden_channels",
    GraphTransformer: "in_channels edge_channels out_channels hidden_channels num_heads "
    "mlp_channels",
    PaiNN: "num_types hidden_channels radial_size",
}
CASES = [(model, name) for model, names in SIZES.items() for name in names.split()]
FURTHER = {PaiNN: {"cutoff": 1.0}, GPT: {"hidden_size": 8}}


@pytest.mark.parametrize("wrong", [0, -3, 1.0, True, "4"])
@pytest.mark.parametrize(("model", "name"), CASES)
def test_sizes_are_positive(model, name, wrong):
    sizes = of(model)
    with pytest.raises(ArgumentError, match=f"{model.__name__}: {name}"):
        model(**sizes | {name: wrong})
    assert sum(p.numel() for p in model(**sizes).parameters()) > 0


def of(model):
    return dict.fromkeys(SIZES[model].split(), 2) | FURTHER.get(model, {}) | {blocks(model): 1}


def blocks(model):
    return "num_layers" if model is GPT else "num_blocks"


@pytest.mark.parametrize("wrong", [-1, 1.0, True])
@pytest.mark.parametrize("model", SIZES)
def test_blocks_are_counted(model, wrong):
    name = blocks(model)
    with pytest.raises(ArgumentError, match=f"{model.__name__}: {name}"):
        model(**of(model) | {name: wrong})
    few, more = (model(**of(model) | {name: n}) for n in (0, 1))
    assert len(list(few.parameters())) < len(list(more.parameters()))


@pytest.mark.parametrize("cutoff", [0, -1.0, float("nan"), float("inf")])
def test_a_cutoff_is_a_length(cutoff):
    with pytest.raises(
        ArgumentError, match=f"PaiNN: cutoff must be a positive length, got {cutoff}"
    ):
        PaiNN(1, cutoff, hidden_channels=2, num_blocks=1)
