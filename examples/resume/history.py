"""A log of a training in lines of JSON, and its summary."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Run:
    """The steps between two starts of the ranks."""

    ranks: int
    start: int  # the first step
    children: dict[int, int]  # process ids of ranks, by the ids of their agents
    losses: dict[int, float] = field(default_factory=dict)  # by step
    saves: list[int] = field(default_factory=list)  # steps before which a save began
    cost: str = ""  # number of its steps, after its end


@dataclass
class History:
    """A file of JSON lines that the first rank writes."""

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
            whole, _, _ = self.path.read_text().rpartition("\n")  # the last line may be incomplete
            yield from map(json.loads, whole.splitlines())


def differences(alone: Run, runs: Sequence[Run]) -> Iterator[float]:
    """Return the relative difference of each step's loss from an uninterrupted run."""
    for run in runs:
        for step, loss in run.losses.items():
            yield abs(loss - alone.losses[step]) / abs(alone.losses[step])


def table(alone: Run, runs: Sequence[Run]) -> str:
    """Return a table of losses, with one column per run."""
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
