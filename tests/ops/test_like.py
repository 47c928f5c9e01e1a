"""``like=``, for which the root sends no description: no message, and wrong arguments."""

import pytest
import torch

import varcomm
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError

F = torch.zeros


@on_ranks(3)
def test_no_description_is_sent(rank):
    """Without rows there is nothing to send: with `like` not even to the root."""
    with varcomm.trace() as calls:
        x = F(0, 2) if rank == 0 else None
        assert varcomm.scatter_v(x, [0, 0, 0], like=F(5, 2)).shape == (0, 2)
        assert varcomm.broadcast(x, like=F(0, 2)).shape == (0, 2)
    assert calls.total.messages_sent == calls.total.messages_received == 0


WRONG = {
    "a list": (F(3, 2), [1.0], "like must be a torch.Tensor; got list"),
    "no tensor": (None, F(3, 2), "tensor must be a torch.Tensor; got NoneType"),
    "dtype": (F(3, 2), F(3, 2).double(), "like must match .* dtype is torch.float64"),
    "requires_grad": (F(3, 2, requires_grad=True), F(3, 2), "like must match .* requires_grad"),
    "shape": (F(3, 2), F(3, 1), r"the tensor has shape \(3, 2\).* like"),
    "device": (F(3, 2), F(3, 2, device="meta"), "like must match .* device"),
}


# with arguments after the tensor; rank 0 is the root
@pytest.mark.parametrize(("name", "rest"), [("scatter_v", ([2, 1],)), ("broadcast", ())])
@on_ranks(2)
def test_wrong_or_differing(rank, name, rest):
    op, right = getattr(varcomm, name), F(3, 2)
    for x, like, message in WRONG.values():
        if rank == 0:
            with pytest.raises(ArgumentError, match=f"^{name} on rank 0 of 2: {message}"):
                op(x, *rest, like=like)
        with pytest.raises(DisagreementError, match=message), varcomm.debug():
            op(x, *rest, like=like) if rank == 0 else op(None, *rest, like=right)
    of_rank_1 = {
        "like": None,
        "dtype": right.int(),
        "requires_grad": F(3, 2, requires_grad=True),
        "shape": F(3, 3),
        "sizes": right,
    }
    for word, like in of_rank_1.items():
        words = [[1, 2]] if word == "sizes" and rank == 1 and rest else rest
        if word == "sizes" and not rest:
            continue
        with pytest.raises(DisagreementError, match=f"disagree on {word}"), varcomm.debug():
            op(right, *words, like=right if rank == 0 else like)
    if rank == 1:
        with pytest.raises(ArgumentError, match=r"like must be a torch\.Tensor; got list"):
            op(None, *rest, like=[1.0])
    assert varcomm.all_reduce(torch.tensor(1)).item() == 2
