"""Every operation under every transform: it works, or is refused with a reason."""

import re
from itertools import groupby

import torch

import varcomm
from tests.transforms.operations import OPERATIONS
from tests.transforms.transforms import TRANSFORMS, NothingToDo
from varcomm.ops.compilation import UNCOMPILED

WORKS, NOTHING = "works", ""


def verdicts(rank, ranks, column, name):
    """Tell of each transform that it works, or by which reason it is refused; collective.

    Whatever else goes wrong is raised.
    """
    torch.set_num_threads(1)
    found = {}
    for title, check in TRANSFORMS.items():
        alone = "one rank" in title
        if alone == (ranks == 1) or (ranks == 1 and column in ON_ONE_RANK):
            found[title] = verdict(check, OPERATIONS[column][name](rank, ranks), title)
    return found


def verdict(check, op, title):
    try:
        check(op)
    except NothingToDo:
        return NOTHING
    except varcomm.VarcommError as error:
        return re.sub(r"(in a refusal: )?\w+ on rank \d+ of \d+: ", "", str(error))
    except Exception as error:
        if UNCOMPILED in str(error):
            return UNCOMPILED
        error.add_note(f"under {title}")
        if op.alone is None:
            raise
        return refused_in_one_process(check, op, error)
    return WORKS


def refused_in_one_process(check, op, error):
    """Return the reason if torch or PyG refuses the same of a model on no graph of ours."""
    try:
        check(op.alone())
    except Exception as alone:
        if type(alone) is type(error):
            return (
                f"torch refuses it of this layer in one process as well ({type(error).__name__})."
            )
    raise error


WORLDS = dict.fromkeys(OPERATIONS, (1, 3))
WORLDS |= {"distributed models": (1, 2), "with `async_op=True`": (1, 2)}

# The others do there only what is for one rank.
ON_ONE_RANK = ("primitives", "halo exchange")


def found(run, column, name):
    """Return the verdicts on an operation, by transform; they are the same on all ranks.

    `run` takes a number of ranks, a function of the rank, and its arguments.
    """
    merged = {}
    for ranks in WORLDS[column]:
        for told in run(ranks, verdicts, ranks, column, name):
            for title, text in told.items():
                known = merged.setdefault(title, text)
                assert known == text, (ranks, column, name, title, known, text)
    return merged


def cell(told, numbers):
    """Return what a column says of a transform, from the verdicts by operation."""
    if set(told.values()) == {NOTHING}:
        return "-"
    refused = {name: text for name, text in told.items() if text not in (WORKS, NOTHING)}
    if not refused:
        return WORKS
    notes = {name: numbers.setdefault(text, len(numbers) + 1) for name, text in refused.items()}
    if len(refused) == len(told) and len(set(notes.values())) == 1:
        return f"refused [{next(iter(notes.values()))}]"
    by_note = groupby(sorted(notes, key=lambda name: notes[name]), key=lambda name: notes[name])
    parts = [f"{', '.join(f'`{n}`' for n in names)} refused [{note}]" for note, names in by_note]
    return "; ".join(parts if len(refused) == len(told) else [WORKS, *parts])


def rows_and_notes(merged):
    """Return the lines of the table, and of the reasons."""
    numbers, lines = {}, []
    lines.append(f"| | {' | '.join(OPERATIONS)} |")
    lines.append(f"|{' --- |' * (len(OPERATIONS) + 1)}")
    for title in TRANSFORMS:
        cells = [
            cell({name: merged[column, title, name] for name in names}, numbers)
            for column, names in OPERATIONS.items()
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append(f"| CUDA graph capture |{' not run [gpu] |' * len(OPERATIONS)}")
    return lines, [f"{number}. {text}" for text, number in numbers.items()]


def read(page):
    """Return the verdicts that a page tells, by column, transform and operation."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    merged = {}
    for title in TRANSFORMS:
        (row,) = re.findall(rf"^\| {re.escape(title)} \| (.*) \|$", page, re.MULTILINE)
        for (column, names), said in zip(OPERATIONS.items(), row.split(" | "), strict=True):
            alike = re.fullmatch(r"refused \[(\d+)\]", said)
            common = {"-": NOTHING, **({said: notes[alike[1]]} if alike else {})}.get(said, WORKS)
            merged |= {(column, title, name): common for name in names}
            for some, note in re.findall(r"(`[^;]*`) refused \[(\d+)\]", said):
                merged |= {(column, title, name): notes[note] for name in some[1:-1].split("`, `")}
    return merged
