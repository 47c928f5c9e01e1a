"""A batch of the first rank, on all ranks."""

import pickle

import pytest
import torch
import torch.distributed as dist

import varcomm
from varcomm import ArgumentError, DisagreementError, GroupError
from varcomm.tensor_parallel import data as data_module
from varcomm.tensor_parallel.data import broadcast_data

WORLDS = (1, 2, 3, 5)
SHAPES = {
    "plain": (2, 3),
    "scalar": (),
    "none": (0,),
    "hole": (3, 0, 5),
    "one": (1,),
    "deep": (2, 1, 1, 3, 1, 1, 2),
}


def batch(dtype):
    generator = torch.Generator().manual_seed(6)
    made = {
        key: (torch.randn(shape, generator=generator) * 9).to(dtype)
        for key, shape in SHAPES.items()
    }
    turned = torch.randn(4, 3, 2, generator=generator).permute(2, 0, 1)
    return made | {"turned": (turned * 9).to(dtype), "unasked": torch.zeros(1)}


def received(rank, keys, dtype):
    """Elsewhere the data are not looked at: rank 1 has others under the same names."""
    own = batch(dtype) if rank == 0 else {"plain": torch.zeros(9)} if rank == 1 else None
    got = broadcast_data(keys, own, dtype)
    expected = batch(dtype)
    assert list(got) == list(keys)
    return [
        got[key].shape == expected[key].shape
        and got[key].dtype == dtype
        and got[key].is_contiguous()
        and torch.equal(got[key], expected[key])
        for key in keys
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("ranks", WORLDS)
def test_all_ranks_get_what_the_first_has(worlds, ranks, dtype):
    keys = ["turned", *SHAPES]
    assert worlds.run(ranks, received, keys, dtype) == [[True] * len(keys)] * ranks


def shape_of_hole(rank):
    own = {"a": torch.ones(3, 0, 5)} if rank == 0 else None
    return tuple(broadcast_data(["a"], own, torch.float32)["a"].shape)


def test_size_0_is_no_end_of_shape(worlds):
    assert worlds.run(2, shape_of_hole) == [(3, 0, 5)] * 2


def nothing_asked(rank):
    return broadcast_data([], {} if rank == 0 else None, torch.bool)


def test_no_keys(worlds):
    assert worlds.run(3, nothing_asked) == [{}] * 3


def of_bools(rank):
    own = {"mask": torch.tensor([True, False])} if rank == 0 else None
    return broadcast_data(("mask",), own, torch.bool)["mask"].tolist()


def test_bools_and_a_tuple_of_keys(worlds):
    assert worlds.run(2, of_bools) == [[True, False]] * 2


def conjugated(rank):
    own = {"z": torch.tensor([1 + 2j]).conj()} if rank == 0 else None
    return broadcast_data(["z"], own, torch.complex64)["z"].tolist()


def test_a_conjugate_view(worlds):
    assert worlds.run(2, conjugated) == [[1 - 2j]] * 2


def in_groups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3, 4])]
    first = rank in (0, 2)
    own = {"a": torch.tensor([rank])} if first else None
    return broadcast_data(["a"], own, torch.int64, groups[rank > 1])["a"].item()


def test_the_first_rank_is_the_groups(worlds):
    assert worlds.run(5, in_groups) == [0, 0, 2, 2, 2]


def apart(rank):
    """Results do not share versions or memory with each other, nor with the first rank's."""
    x = torch.ones(2, requires_grad=True)
    own = {"a": x, "b": torch.ones(2)} if rank == 0 else None
    got = broadcast_data(["a", "b"], own, torch.float32)
    weight = torch.ones(2, requires_grad=True)
    product = weight * got["a"]
    got["b"].zero_()
    product.sum().backward()
    return got["a"].requires_grad, weight.grad.tolist(), x.detach().tolist(), got["a"].tolist()


def test_results_are_tensors_of_their_own(worlds):
    assert worlds.run(2, apart) == [(False, [1.0] * 2, [1.0] * 2, [1.0] * 2)] * 2


def traffic(rank, ranks):
    """Nothing is pickled: pickle would raise."""
    own = {"a": torch.zeros(5, 3), "b": torch.zeros(())} if rank == 0 else None
    plain = pickle.dumps, pickle.loads
    try:
        pickle.dumps = pickle.loads = None
        with varcomm.trace() as calls:
            broadcast_data(["a", "b"], own, torch.float32)
    finally:
        pickle.dumps, pickle.loads = plain
    return [(call.sent, call.received) for call in calls]


def test_one_message_of_data(worlds):
    """Four integers of each rank, four of the shapes, and the 16 floats."""
    first, *others = worlds.run(3, traffic, 3)
    assert first == [(64, 64), (64, 0), (128, 0)]
    assert others == [[(64, 64), (0, 32), (0, 64)]] * 2


def refused(rank, case):
    good = {"a": torch.zeros(2), "b": torch.zeros(3)}
    keys, own, dtype = ["a", "b"], good if rank == 0 else None, torch.float32
    match case:
        case "no data":
            own = None
        case "missing":
            own = {"a": good["a"]} if rank == 0 else good
        case "dtype":
            own = {**good, "b": torch.zeros(3, dtype=torch.float64)}
        case "sparse":
            own = {**good, "b": torch.zeros(3).to_sparse()}
        case "list":
            own = {**good, "b": [1.0]}
        case "device":
            own = {**good, "b": torch.zeros(3, device="meta")}
        case "meta":
            own = {"a": torch.zeros(2, device="meta"), "b": torch.zeros(3, device="meta")}
        case "string" if rank == 1:
            keys = "ab"
        case "number" if rank == 1:
            keys = ["a", 3]
        case "twice" if rank == 1:
            keys = ["a", "a"]
        case "no dtype" if rank == 1:
            dtype = "float32"
        case "keys" if rank == 1:
            keys = ["b", "a"]
        case "dtypes" if rank == 1:
            dtype = torch.float64
    with pytest.raises((ArgumentError, DisagreementError)) as caught:
        broadcast_data(keys, own, dtype)
    return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no data", "rank 0 of 3: data must be a mapping on the group's first rank; got NoneType"),
        ("missing", "rank 0 of 3: data has no ['b']; it has ['a']"),
        ("dtype", "rank 0 of 3: data['b'] is of torch.float64, but dtype is torch.float32"),
        ("sparse", "rank 0 of 3: data['b'] must be dense"),
        ("list", "rank 0 of 3: data['b'] must be a torch.Tensor; got list"),
        ("device", "rank 0 of 3: data must be on one device; it is on {'a': 'cpu', 'b': 'meta'}"),
        ("meta", "rank 0 of 3: data is on the meta device, where it has no values"),
        ("string", "rank 1 of 3: keys must be a list of different strings; got 'ab'"),
        ("number", "rank 1 of 3: keys must be a list of different strings; got ['a', 3]"),
        ("twice", "rank 1 of 3: keys must be a list of different strings; got ['a', 'a']"),
        ("no dtype", "rank 1 of 3: dtype must be a torch.dtype; got 'float32'"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(worlds, case, message):
    answers = worlds.run(3, refused, case)
    assert answers == [answers[0]] * 3
    assert answers[0][0] == "ArgumentError"
    assert f"broadcast_data: refused on {message}" in answers[0][1]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("keys", "rank 0 ['a', 'b'] of torch.float32; rank 1 ['b', 'a'] of torch.float32; rank 2"),
        ("dtypes", "rank 1 ['a', 'b'] of torch.float64; rank 2 ['a', 'b'] of torch.float32"),
    ],
)
def test_ranks_must_ask_for_the_same(worlds, case, message):
    answers = worlds.run(3, refused, case)
    assert answers == [answers[0]] * 3
    assert answers[0][0] == "DisagreementError"
    assert message in answers[0][1]


def outside(rank):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(GroupError) as caught:
            broadcast_data([], None, torch.float32, group)
        return str(caught.value)


def test_a_rank_that_is_not_in_the_group(worlds):
    assert "rank 1 of the world is not in this group" in worlds.run(2, outside)[1]


def chosen_kinds(rank):
    """Where data on CUDA go, of which there is none here: by the group's backends alone."""

    class Group:
        def __init__(self, **backends):
            self._backends = backends

        def backends(self):
            return self._backends

        def device(self):
            return torch.device("cpu" if "cpu" in self._backends else "cuda")

    class Data:
        def __init__(self, kind):
            self.device = torch.device(kind)

    both, nccl, gloo = Group(cpu="gloo", cuda="nccl"), Group(cuda="nccl"), Group(cpu="gloo")
    kind = data_module._kind
    return [kind([Data(on)], group) for group in (both, nccl, gloo) for on in ("cpu", "cuda")]


def test_device_of_the_data_where_the_group_serves_it(worlds):
    assert worlds.run(1, chosen_kinds) == [["cpu", "cuda", "cuda", "cuda", "cpu", "cpu"]]
