"""``load_safetensors``: shards from files of other tools, without a rank that reads it all."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.of_other_tools import write
from tests.checkpoint.tied import assert_states, made, sharded
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.checkpoint import full_state_dict, load_safetensors, save
from varcomm.sharding import ShardSpec, mark


def without_values(device="meta", dtype=None):
    """A sharded model of other values, or on the meta device."""
    with torch.device(device):
        model = made(seed=0)
    return sharded(model.to(dtype))


def whole(drop=()):
    tensors = {name: value.clone() for name, value in made().state_dict().items()}
    return {name: value for name, value in tensors.items() if name not in drop}


def check(model, expected):
    assert_states(full_state_dict(model, None), expected)


@pytest.fixture
def files(tmp_path):
    """Folders of files by what is in them."""
    write(tmp_path / "one", whole())
    write(tmp_path / "without copies", whole(drop=["embedding.weight"]))
    write(tmp_path / "two", whole(drop=["head.weight"]), files=2)
    renamed = {f"m.{name}": value for name, value in whole(drop=["head.weight"]).items()}
    write(tmp_path / "renamed", renamed)
    write(tmp_path / "less", whole(drop=["up.weight"]) | {"more": torch.ones(1)})
    write(tmp_path / "unused", whole() | {"more": torch.ones(1)})
    write(tmp_path / "differ", whole() | {"head.weight": torch.ones(11, 4)})
    write(tmp_path / "cut", whole())
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    save({"model": made()}, tmp_path / "ours")
    return tmp_path


@on_ranks(*WORLDS)
def test_each_rank_reads_its_slices(rank, files):
    folder, expected = files, made().state_dict()
    for where, device in (
        ("two", "meta"),
        ("without copies", "cpu"),
        ("one", "meta"),
        ("two/model.safetensors.index.json", "cpu"),
    ):
        model = without_values(device)
        load_safetensors(model, folder / where)
        check(model, expected)
        assert model.head.weight is model.embedding.weight
        assert not model.fused.requires_grad
        assert model.up.weight.requires_grad
    torch.testing.assert_close(model.down(model.up(torch.ones(2, 4))).shape, (2, 4))
    for names in ({f"{n}": f"m.{n}" for n in expected}, "m.{}".format):
        model = without_values()
        load_safetensors(model, folder / "renamed", names)
        check(model, expected)
    model = without_values(dtype=torch.bfloat16)
    load_safetensors(model, folder / "two")
    check(model, made().to(torch.bfloat16).state_dict())


@on_ranks(3)
def test_a_model_on_meta_under_fully_shard(rank, tmp_path):
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
    if rank == 0:
        write(tmp_path / "x", alone.state_dict())
    dist.barrier()
    mesh, x = init_device_mesh("cpu", (3,)), torch.ones(2, 4)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    load_safetensors(model, tmp_path / "x")
    check(model, alone.state_dict())
    torch.testing.assert_close(model(x), alone(x))
    model(x).sum().backward()
    alone(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), alone[0].weight.grad)


@on_ranks(3)
def test_refusals(rank, files):
    folder = files
    with torch.device("meta"):
        rotary = made()
        rotary.register_buffer("angles", torch.zeros(3), persistent=False)
    wide = made()
    wide.up = nn.Linear(4, 8)
    ints = made().to(torch.float32)
    ints.norm.num_batches_tracked = torch.zeros((), dtype=torch.int32)
    expanded = made()
    expanded.up.bias = nn.Parameter(torch.zeros(1).expand(7))
    other = made() if rank == 1 else nn.Linear(4, 7)
    for where, model, options, words in (
        ("less", made(), {}, "'up.weight' is missing in the files"),
        ("less", made(), {}, "1 tensors are not in the model: 'more' .strict=False"),
        ("less", made(), {"names": {"head.weight": "x", "embedding.weight": "y"}}, "'y' or 'x' is"),
        ("one", wide, {}, r"'up.weight' has \(7, 4\), torch.float32 in the files and \(8, 4\)"),
        ("one", ints, {}, r"torch.int64 in the files and \(\), torch.int32 in the model"),
        ("one", rotary, {}, "'angles' is on the meta device and not in the state dict"),
        ("one", expanded, {}, "'up.bias' is an expanded tensor"),
        ("one", other, {}, "'weight' is missing in the files" if rank != 1 else "is missing"),
        ("differ", made(), {}, "'embedding.weight' and 'head.weight' share a parameter"),
        ("cut", made(), {}, "model.safetensors is damaged"),
        ("none", made(), {}, "none"),
        ("ours", made(), {}, "has a checkpoint of varcomm. Use checkpoint.load"),
        ("one", {}, {}, "model must be a Module; got dict"),
        ("one", made(), {"names": 5}, "names must be a mapping or a function"),
        ("one", made(), {"strict": 1}, "strict must be True or False"),
        ("one", without_values(), {"device": "nowhere"}, "nowhere"),
    ):
        before = {
            name: value.clone() for name, value in getattr(model, "state_dict", dict)().items()
        }
        with pytest.raises(ArgumentError, match=words):
            load_safetensors(model, folder / where, **options)
        if where != "differ" and model != {}:
            after = model.state_dict()
            assert all(v.is_meta or torch.equal(v, before[n]) for n, v in after.items())
    with pytest.raises(DisagreementError, match="disagree on the tensors of"):
        load_safetensors(made(), folder / ("two" if rank == 1 else "one"))
    with pytest.raises(DisagreementError, match="disagree on strict"):
        load_safetensors(made(), folder / "one", strict=rank == 1)
    model = made(seed=0)
    load_safetensors(model, folder / "unused", strict=False)
    check(model, made().state_dict())


def memory(rank, folder):
    """Memory that grows: the mapped pages of the file and the loaded tensors."""
    with torch.device("meta"):
        model = nn.Linear(1000, 20_000, bias=False)
    spec = ShardSpec.of([1000, 0, 19_000])
    model.weight = mark(nn.Parameter(torch.empty(spec.local, 1000, device="meta")), spec)

    def resident():
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)["VmRSS"].split()[0]) / 1000

    before = resident()
    load_safetensors(model, folder)
    grown = resident() - before
    assert model.weight.shape == (spec.local, 1000)
    if spec.local:
        assert model.weight[:, 0].tolist() == [float(row) for row in range(*spec.ranges(rank)[0])]
    return grown


def test_no_rank_reads_the_slices_of_others(worlds, tmp_path):
    write(tmp_path / "x", {"weight": torch.arange(20_000.0).view(-1, 1).expand(-1, 1000).clone()})
    first, second, _ = worlds.run(3, memory, tmp_path / "x")
    assert first < 20  # MB, of 4 MB that it owns and 80 MB in the file
    assert second < 12


def test_one_process(tmp_path):
    write(tmp_path / "x", whole())
    with torch.device("meta"):
        model = made()
    load_safetensors(model, tmp_path / "x")
    expected = made().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
