"""What a sum over ranks carries: a few bits of the digest of this rank's calls.

The bits are numbers that are summed with the values, so no message is added. From the sums alone
each rank sees whether all numbers were equal. So all ranks raise, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, nan, prod
from typing import NamedTuple

import torch
from torch import Tensor

from varcomm.errors import DisagreementError
from varcomm.transport.agreement import disagree, share
from varcomm.transport.call_log import CallLog
from varcomm.transport.debug import settle
from varcomm.transport.engine import Pending, is_capturing
from varcomm.transport.group import Group, GroupLike, resolve

# Bits of integers that a dtype represents exactly; two are left for the rounding of a quotient.
_EXACT = {torch.float32: 22, torch.float64: 50, torch.complex64: 22, torch.complex128: 50}
_EXACT |= {torch.int32: 30, torch.int64: 62}
_MOST = 16  # bits that a sum carries; their table has 65,536 rows
_FLAGS = 8  # bits that numbers of one or two bytes carry
_SMALL = 1024  # bytes of sums that carry a word: one of 16 KiB would take up to a quarter longer
_AGE = 32  # sums after which one on a GPU is compared at the latest


class Word(NamedTuple):
    """The numbers that a sum carries, and how often ranks had differed before."""

    values: Tensor
    errors: int
    explain: Callable[[], None] | None = None  # raises if something else than calls differs


class Words:
    """Makes words for sums of one dtype on one device.

    A word is ``w, w * w``: P numbers are equal if P times the sum of their squares is the square of
    their sum. Numbers of one or two bytes have a pair of flags per bit: one of both is not 0. No
    `w` is 0: ranks that sum other dtypes must all see it, and read each other's bits.
    """

    def __init__(
        self, group: Group, log: CallLog, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._log = log
        exact = (_EXACT.get(dtype, 0) - (group.size - 1).bit_length()) // 2
        self.bits = max(0, min(exact, _MOST))
        if dtype.itemsize <= 2:  # a sum of as many ones wraps to 0
            self.bits = 0 if group.size >> 8 and not dtype.is_floating_point else _FLAGS
        numbers = torch.arange(1 << self.bits, device="cpu").unsqueeze(1)
        if dtype.itemsize <= 2:
            flags = torch.cat([numbers >> n & 1 for n in range(_FLAGS)], 1)
            flags = torch.cat([flags, 1 - flags], 1)
            one = nan if dtype.is_floating_point else 1
            table = torch.where(flags != 0, one, 0.0)
        else:
            table = torch.cat([numbers + 1, (numbers + 1) ** 2], 1)
        self.table = table.to(dtype).to(device)

    def now(self) -> Word:
        """Return the word of the present digest."""
        return Word(self.table[self._log.bits(self.bits)], self._log.errors)

    def with_sample(self, sample: Tensor, explain: Callable[[], None]) -> Word:
        """Return the word of the digest and of a hash of values, in int64 on the device."""
        number = (sample + self._log.bits(self.bits)) & ((1 << self.bits) - 1)
        values = self.table.index_select(0, number.view(1)).view(-1)
        return Word(values, self._log.errors, explain)


def words(group: Group, dtype: torch.dtype, device: torch.device) -> Words | None:
    """Return the words of a group; None if it keeps no log, or the dtype has no room."""
    if group.log is None or not group.log.active:
        return None
    key = "words", dtype, device
    kept: Words | None = group.auxiliary.get(key)
    if kept is None:
        kept = group.auxiliary[key] = Words(group, group.log, dtype, device)
    return kept if kept.bits else None


def carrying(
    group: Group,
    prepare: Callable[[Tensor], Callable[[Tensor], Pending]],
    x: Tensor,
    divisor: int,
) -> Callable[[Tensor], Pending]:
    """Return the start of sums like `x`, which carry a word if they are small.

    The sums of many values have no room for it: all of them would be copied.
    """
    of_dtype = words(group, x.dtype, x.device) if x.nbytes <= _SMALL else None
    if of_dtype is None:
        return prepare(x)
    shape, flat = x.shape, x.dim() == 1
    begin = prepare(x.new_empty(x.numel() + of_dtype.table.shape[1]))

    def start(x: Tensor) -> Pending:
        own = of_dtype.now()
        pending = begin(torch.cat((x if flat else x.reshape(-1), own.values)))
        return carried(pending, group, shape, own, divisor)

    return start


def carried(
    pending: Pending, group: Group, shape: Sequence[int], word: Word, divisor: int = 1
) -> Pending:
    """Let a sum of flat values and a word behind them compare it, and return the values."""
    count, row_major = prod(shape), _strides(shape)

    def parts(total: Tensor) -> tuple[Tensor, Tensor]:
        return total.as_strided(shape, row_major), total[count:]

    return _comparing(pending, group, parts, word, divisor)


def carrying_gather(
    group: Group, prepare: Callable[[int], Callable[[Tensor], Pending]], x: Tensor
) -> Callable[[Tensor], Pending] | None:
    """Return the start of gathers of tensors like `x` from all ranks, which carry a word.

    ``prepare(count)`` returns the start of a gather of `count` values per rank. None if ranks
    compare nothing.
    """
    of_dtype = words(group, x.dtype, x.device)
    if of_dtype is None or group.size == 1:
        return None
    count, shape = x.numel(), (group.size * x.shape[0], *x.shape[1:])
    begin = prepare(count + of_dtype.table.shape[1])

    def parts(gathered: Tensor) -> tuple[Tensor, Tensor]:
        rows = gathered.view(group.size, -1)
        return rows[:, :count].reshape(shape), rows[:, count:].sum(0)

    def start(x: Tensor) -> Pending:
        own = of_dtype.now()
        pending = begin(torch.cat((x.reshape(-1), own.values)))
        return _comparing(pending, group, parts, own)

    return start


def _comparing(
    pending: Pending,
    group: Group,
    parts: Callable[[Tensor], tuple[Tensor, Tensor]],
    word: Word,
    divisor: int = 1,
) -> Pending:
    """Let a message compare the sum of words among the `parts` of its result."""
    finish = pending.finish
    refused: DisagreementError | None = None

    def checked() -> Tensor:
        nonlocal refused
        if refused is not None:  # to wait again is not collective
            raise refused
        values, total = parts(finish())
        try:
            _compare(group, total, word, divisor)
        except DisagreementError as error:
            refused = error
            raise
        return values

    pending.finish = checked
    return pending


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a row-major tensor."""
    return [prod(shape[place + 1 :]) for place in range(len(shape))]


def _compare(group: Group, total: Tensor, word: Word, divisor: int) -> None:
    """Raise on all ranks if the `total` of a word shows that they differ.

    On an accelerator it is copied, and compared at a later sum: nothing waits here.
    """
    log = group.log
    if log is None or group.simulated:
        return
    if total.is_cpu:
        _raise_if_differing(group, total, word, divisor)
        return
    if is_capturing():
        return
    has_gpu = torch.accelerator.is_available()
    here = torch.empty(total.shape, dtype=total.dtype, device="cpu", pin_memory=has_gpu)
    here.copy_(total, non_blocking=True)
    done = torch.Event(total.device) if has_gpu else None
    if done is not None:
        done.record()
    log.pending.append(partial(_look, group, done, here, word, divisor))
    settle(group, _AGE)


def _look(group: Group, done: torch.Event | None, total: Tensor, word: Word, divisor: int) -> None:
    if done is not None:
        done.synchronize()
    _raise_if_differing(group, total, word, divisor)


def refuse_if(group: Group, flag: Tensor, explain: Callable[[], None]) -> None:
    """Call `explain`, which raises, if a flag is set that is equal on all ranks; collective.

    On an accelerator the flag is looked at when later sums are compared.
    """
    if group.log is not None and group.log.active:
        of_equal_words = torch.zeros(2, dtype=torch.float32, device=flag.device)
        of_equal_words[0] = flag
        _compare(group, of_equal_words, Word(flag, group.log.errors, explain), 1)


def _raise_if_differing(group: Group, total: Tensor, word: Word, divisor: int) -> None:
    log = group.log
    # a word from before an error is of another digest
    is_of_now = log is not None and word.errors == log.errors
    if is_of_now and not _of_equal_words(total.tolist(), group.size, divisor):
        disagree(group, word.explain)


def _of_equal_words(total: Sequence[float | complex], ranks: int, divisor: int) -> bool:
    """Return whether all ranks carried the same word, from its sum alone."""
    if len(total) > 2:
        half = len(total) // 2
        return all((a == 0) != (b == 0) for a, b in zip(total[:half], total[half:], strict=True))
    if not all(isfinite(value.real) for value in total):
        return False
    first, squares = (round(value.real * divisor) for value in total)
    return ranks * squares == first * first


def check(group: GroupLike = None) -> None:
    """Compare the calls that ranks have made so far; collective.

    Each sum over ranks compares them as well. Use this function at the end of a program without
    sums, or on GPUs, where a sum compares what an earlier one has carried.

    Parameters
    ----------
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Raises
    ------
    DisagreementError
        On every rank, with the first call that differs, and the name that it has on each rank.

    See Also
    --------
    debug, init

    Notes
    -----
    Adjoint: none; no tensor is returned.
    Communication: a gather and a broadcast of 1 KiB per rank.

    In one process: nothing.

    Examples
    --------
    >>> import torch, varcomm
    >>> def fn(rank):
    ...     x = torch.zeros(2, dtype=torch.int32 if rank == 1 else torch.float32)
    ...     varcomm.all_gather_v(x, [2, 2])  # of equal length, so that nothing fails
    ...     try:
    ...         varcomm.check()
    ...     except varcomm.DisagreementError as error:
    ...         return str(error).split(";")[0]
    >>> varcomm.launch(fn, 2)
    ['ranks have made different calls', 'ranks have made different calls']
    """
    ranks = resolve(group)
    settle(ranks)
    share("check", lambda: None, ranks)
