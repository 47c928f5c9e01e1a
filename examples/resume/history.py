"""A log of a training, line by line, and its summary."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Run:
    """From one start of the ranks to the next."""

    ranks: int
    start: int  # the first step
    children: dict[int, int]  # process numbers of ranks, by those of the agents
    losses: dict[int, float] = field(default_factory=dict)  # by step
    saves: list[int] = field(default_factory=list)  # steps before which one was begun
    cost: str = ""  # of its steps, once it is over


@dataclass
class History:
    """A file of lines of JSON, to which the first rank adds."""

    path: Path

    def note(self, event: str, **facts: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")

    def runs(self) -> list[Run]:
        found: list[Run] = []
        for fact in self._lines():
            event = fact.pop("event")
            if event == "start":
                children = {agent: rank for rank, agent in fact["processes"]}
                found.append(Run(fact["ranks"], fact["step"], children))
            elif event == "step":
                found[-1].losses[fact["step"]] = fact["loss"]
            elif event == "end":
                found[-1].cost = fact["cost"]
            else:
                found[-1].saves.append(fact["step"])
        return found

    def last(self) -> Run | None:
        return next(reversed(self.runs()), None)

    def _lines(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            whole, _, _ = self.path.read_text().rpartition("\n")  # the last may still be written
            yield from map(json.loads, whole.splitlines())


def differences(alone: Run, runs: Sequence[Run]) -> Iterator[float]:
    """Of the loss of each step that was made, relative to that of an uninterrupted run."""
    for run in runs:
        for step, loss in run.losses.items():
            yield abs(loss - alone.losses[step]) / abs(alone.losses[step])


def table(alone: Run, runs: Sequence[Run]) -> str:
    """The loss of some steps, a column for each run."""
    shown = set(range(0, max(alone.losses) + 1, 10)) | {max(alone.losses)}
    for run in runs:
        shown |= {min(run.losses), max(run.losses)} if run.losses else set()
    columns = [("one process", alone), *((f"{run.ranks} ranks", run) for run in runs)]
    lines = ["  step" + "".join(f"{name:>20}" for name, _ in columns)]
    for step in sorted(shown):
        losses = [run.losses.get(step) for _, run in columns]
        cells = ["" if loss is None else f"{loss:.14f}" for loss in losses]
        lines.append(f"{step:6}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)
