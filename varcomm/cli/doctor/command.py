"""The arguments of ``varcomm doctor``, and the page that it prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from varcomm.cli.doctor import facts
from varcomm.cli.doctor.checks import CHECKS
from varcomm.cli.doctor.engines import Engine, engines, tried

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "run"]

HELP = "tell what works here, ready to paste into an issue"
DESCRIPTION = """\
Tell versions, machine, GPUs and network interfaces, and try each engine that
is there on 2 ranks of this machine: each primitive must move what it should,
and its backward must be the adjoint. What is printed is Markdown; it has
addresses of this machine, so read it before you publish it.

The status is 1 if anything that is installed does not work. No engine takes
longer than a start of ranks (180 s at most) and --timeout for a check.

example:
  %(prog)s > doctor.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="after so long a check has failed; default 60",
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Look, try, and tell."""
    found: dict[str, Any] = {
        "versions": facts.versions(),
        "machine": facts.machine(),
        "gpus": facts.gpus(),
        "interfaces": facts.interfaces(),
        "environment": facts.variables(),
    }
    results = [tried(engine, options.timeout, _progress) for engine in engines()]
    _progress("")
    ok = all(engine.state != "fails" for engine in results)
    if options.json:
        listed = [engine.to_dict() for engine in results]
        print(json.dumps({"ok": ok, **found, "engines": listed}, indent=1))
    else:
        print("\n".join(_page(found, results)))
    return 0 if ok else 1


def _progress(words: str) -> None:
    """Say what is being tried, to whoever looks on."""
    if sys.stderr.isatty():
        print(f"\r{words:<60}\r", end="", file=sys.stderr, flush=True)


def _page(found: Mapping[str, Any], results: Sequence[Engine]) -> Iterator[str]:
    yield "### varcomm doctor\n"
    rows = {**found["versions"], **found["machine"]}
    rows["GPUs"] = "; ".join(found["gpus"]) or "none that torch can use"
    for name, addresses in found["interfaces"].items():
        rows[f"interface {name}"] = ", ".join(addresses) or "no address"
    yield from _table(["", ""], rows.items())
    if found["environment"]:
        yield ""
        yield from _table(["variable", "value"], found["environment"].items())
    yield "\n### Engines, tried\n"
    yield from _table(["engine", "ranks", "result"], map(_summary, results))
    there = [engine for engine in results if engine.passed]
    if there:
        yield ""
        verdicts = {True: "pass", False: "**fail**", None: "not tried"}
        yield from _table(
            ["dot test on all ranks", *(engine.name for engine in there)],
            ([name, *(verdicts[engine.passed.get(name)] for engine in there)] for name in CHECKS),
        )
    for engine in results:
        if engine.state == "fails":
            for name, reason in engine.reasons.items():
                yield f"\n{engine.name}, {name}: {reason}"


def _summary(engine: Engine) -> list[str]:
    if engine.state == "absent":
        return [engine.name, "", f"not there: {engine.reasons['absent']}"]
    if engine.state == "works":
        return [engine.name, str(engine.ranks), f"works: {len(CHECKS)} of {len(CHECKS)} checks"]
    said = f"{sum(engine.passed.values())} of {len(CHECKS)} checks pass"
    return [engine.name, str(engine.ranks), f"**fails**: {said}"]


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return number
