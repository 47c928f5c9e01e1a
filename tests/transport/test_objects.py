"""Small objects of all ranks: one round of messages, or two where one of them is long."""

import pytest
import torch.distributed as dist

from varcomm.transport.engines import engine_for
from varcomm.transport.group import resolve
from varcomm.transport.objects import all_gather_object
from varcomm.transport.serialization import to_bytes

# Of a text that, with its length before it, just fits one message.
FITS = 1024 - 8 - len(to_bytes("." * 1000)) + 1000


def told(rank, lengths):
    group = resolve(None)
    kind = type(engine_for(group, group.device()))
    rests, all_gather = [], kind.all_gather

    def counted(self, group, out, data, counts):
        if counts != [1024] * group.size:  # the second message, as long as what is left on each
            rests.append(counts)
        return all_gather(self, group, out, data, counts)

    kind.all_gather = counted
    try:
        return all_gather_object(str(rank) * lengths[rank], group), len(rests)
    finally:
        kind.all_gather = all_gather


@pytest.mark.parametrize(
    ("lengths", "rests"),
    [
        ([0, 0, 0], 0),
        ([FITS, 5, FITS], 0),
        ([FITS, FITS + 1, 0], 1),  # the rest of one rank
        ([100_000, FITS + 1, 30_000], 1),
    ],
)
def test_objects_of_all_lengths(worlds, lengths, rests):
    expected = [str(rank) * length for rank, length in enumerate(lengths)]
    assert worlds.run(3, told, lengths) == [(expected, rests)] * 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_ranks(worlds, ranks):
    lengths = [10_000 * rank for rank in range(ranks)]
    expected = [str(rank) * length for rank, length in enumerate(lengths)]
    assert [both[0] for both in worlds.run(ranks, told, lengths)] == [expected] * ranks


def in_subgroups(rank):
    group = [dist.new_group([3, 1]), dist.new_group([0, 2])][(rank + 1) % 2]
    return all_gather_object({"rank": rank, "text": "x" * 2000 * rank}, resolve(group))


def test_ranks_of_subgroups(worlds):
    say = [{"rank": rank, "text": "x" * 2000 * rank} for rank in range(4)]
    # ranks of a group are in the order of the world
    odd, even = [say[1], say[3]], [say[0], say[2]]
    assert worlds.run(4, in_subgroups) == [even, odd, even, odd]
