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
FURTHER = {PaiNN: {"cutoff": 1.0}, GPT: {"hidden_size": 8}}


@pytest.mark.parametrize("model", SIZES)
def test_sizes_are_positive_and_blocks_are_counted(model):
    names, blocks = SIZES[model].split(), "num_layers" if model is GPT else "num_blocks"
    sizes = dict.fromkeys(names, 2) | FURTHER.get(model, {}) | {blocks: 1}
    wrongs = [(name, wrong) for name in names for wrong in (0, -3, 1.0, True, "4")]
    for name, wrong in [*wrongs, *((blocks, wrong) for wrong in (-1, 1.0, True))]:
        with pytest.raises(ArgumentError, match=f"{model.__name__}: {name}"):
            model(**sizes | {name: wrong})
    few, more = (model(**sizes | {blocks: n}) for n in (0, 1))
    assert 0 < len(list(few.parameters())) < len(list(more.parameters()))


@pytest.mark.parametrize("cutoff", [0, -1.0, float("nan"), float("inf")])
def test_a_cutoff_is_a_length(cutoff):
    said = f"PaiNN: cutoff must be a positive length, got {cutoff}"
    with pytest.raises(ArgumentError, match=said):
        PaiNN(1, cutoff, hidden_channels=2, num_blocks=1)
