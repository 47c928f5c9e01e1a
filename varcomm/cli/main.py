"""``varcomm COMMAND``, also ``python -m varcomm COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from varcomm.cli.arguments import did_you_mean

__all__ = ["main"]

# The module of a command is imported when it runs. Each has DESCRIPTION, add_arguments(parser), and
# run(options, parser), which returns the exit status.
_COMMANDS = {
    "doctor": "test each engine and print a report for an issue",
    "partition": "cut a graph or mesh into parts for ranks to load",
    "check": "compare a graph model on ranks with one process",
    "inspect": "list the content of a saved partition, checkpoint or graph",
    "simulate": "predict a training step on many ranks",
    "bench": "measure each primitive and a plan on an engine",
}
_DESCRIPTION = "Check an installation, and prepare and plan runs on many ranks."
_EPILOG = """\
Run `%(prog)s COMMAND --help` for the options of a command and an example.

exit status: 0 success, 1 failure, 2 usage error, 130 Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; None reads the arguments of the process."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    raw = argparse.RawDescriptionHelpFormatter
    prog = "varcomm" if Path(sys.argv[0]).stem == "varcomm" else "python -m varcomm"
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw
    )
    parser.add_argument("-V", "--version", action="version", version=version("varcomm"))
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    parsers = {
        name: commands.add_parser(name, help=words, formatter_class=raw)
        for name, words in _COMMANDS.items()
    }
    if not given:
        parser.print_help(sys.stderr)
        return 2
    own = parsers.get(given[0])
    if own is None:
        if not given[0].startswith("-"):
            parser.error(f"{given[0]!r} is not a command{did_you_mean(given[0], _COMMANDS)}")
        parser.parse_args(given)  # prints help, or raises SystemExit
        parser.error("a command must come first")
    command = import_module(f"varcomm.cli.{given[0]}")
    from varcomm.errors import VarcommError  # here, because it imports torch

    own.description = command.DESCRIPTION
    command.add_arguments(own)
    options = own.parse_args(given[1:])  # its errors show the usage of the command
    try:
        status: int = command.run(options, own)
        if sys.stdout is not None:  # None if the caller closed it
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{own.prog}: interrupted", file=sys.stderr)
        return 130
    except (VarcommError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does
            print(f"{own.prog}: {error}", file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()
        return 1
    return status


def _drop_output() -> None:
    """Discard buffered output that stdout refuses; else Python reports it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
