"""Messages of a loader: blocks for every rank, on a group of the loader's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from varcomm.errors import DisagreementError
from varcomm.graph.draws import Array
from varcomm.transport.engine import Route, wait_for
from varcomm.transport.engines.choose import prepared
from varcomm.transport.failure import explained, table
from varcomm.transport.group import Group


@dataclass(frozen=True)
class Messages:
    """Exchanges of one batch or of the end of an iteration.

    `call` is (epoch, batch, is_end). At the end, `batch` counts the delivered batches.
    """

    group: Group
    call: tuple[int, int, bool]
    name: str  # of the loader

    def start_comparing(self) -> Callable[[], None]:
        """Send this rank's call; the result waits for the others, and raises if calls differ.

        Uses point-to-point sends: a rank that does not wait for them can exit.
        """
        group, own = self.group, torch.tensor(self.call, dtype=torch.int64, device="cpu")
        calls, sizes = own.expand(group.size, 3).clone(), [own.nbytes] * group.size
        if group.size == 1:
            return lambda: None
        with explained(self.name, group):
            route = Route("copies", group, sizes, sizes)
            works = prepared(route, own.device, self.name)(calls, own)

        def finish() -> None:
            with explained(self.name, group):
                wait_for(works)
            if (calls != own).any():
                raise DisagreementError(
                    f"{self.name}: ranks are at different batches. Iterate over the loader on "
                    "every rank, and leave the loop on all ranks at the same batch.\n"
                    + table(_words(*call) for call in calls.tolist())
                )

        return finish

    def counts(self, own: Array) -> Array:
        """Return a row of integers (P, k) from every rank; row r of `own` is for rank r."""
        each = [own[:1].nbytes] * self.group.size
        return self._all_to_all(_bytes(own), each, each).view(own.dtype).reshape(own.shape)

    def exchange(
        self, parts: Sequence[Array], sent: Sequence[Array], expected: Sequence[Array]
    ) -> list[Array]:
        """Send blocks of rows of several arrays, in one message to each rank.

        ``sent[i][r]`` rows of ``parts[i]`` are for rank r, the first ones for rank 0, and
        ``expected[i][r]`` come from rank r. Returns the received rows of each part.
        """
        if self.group.size == 1 or not parts:
            return list(parts)
        width = np.array([[part.itemsize * int(np.prod(part.shape[1:]))] for part in parts])
        leaving, arriving = np.stack([*sent]) * width, np.stack([*expected]) * width
        own = [np.split(_bytes(x), np.cumsum(n)[:-1]) for x, n in zip(parts, leaving, strict=True)]
        buffer = np.concatenate([block for blocks in zip(*own, strict=True) for block in blocks])
        received = self._all_to_all(
            buffer, leaving.sum(axis=0).tolist(), arriving.sum(axis=0).tolist()
        )
        blocks, out = np.split(received, np.cumsum(arriving.T)[:-1]), []
        for i, (part, counts) in enumerate(zip(parts, expected, strict=True)):
            rows = np.concatenate(blocks[i :: len(parts)]).view(part.dtype)
            out.append(rows.reshape(int(np.sum(counts)), *part.shape[1:]))
        return out

    def _all_to_all(self, own: Array, sent: Sequence[int], expected: Sequence[int]) -> Array:
        """Exchange bytes, without the comparisons of ``debug``: batches are compared already."""
        if self.group.size == 1:
            return own
        out = torch.empty(sum(expected), dtype=torch.uint8, device="cpu")
        with explained(self.name, self.group):
            route = Route("all", self.group, expected, sent)
            wait_for(prepared(route, out.device, self.name)(out, torch.from_numpy(own)))
        return out.numpy()


def _bytes(part: Array) -> Array:
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def _words(epoch: int, batch: int, is_end: int) -> dict[str, object]:
    call = f"ended after {batch} batches" if is_end else f"batch {batch}"
    return {"iteration": epoch, "call": call}
