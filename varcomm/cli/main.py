"""``varcomm COMMAND``, also ``python -m varcomm COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from varcomm.cli import bench, doctor, inspect, partition, simulate
from varcomm.errors import VarcommError

__all__ = ["main"]

# Each module has HELP (one line), DESCRIPTION, add_arguments(parser), and run(options, parser),
# which returns the exit status.
_COMMANDS = {
    "doctor": doctor,
    "partition": partition,
    "inspect": inspect,
    "simulate": simulate,
    "bench": bench,
}
_DESCRIPTION = "Check an installation, and prepare and plan runs on many ranks."
_EPILOG = """\
Run `%(prog)s COMMAND --help` for the options of a command and an example.

exit status: 0 success, 1 failure, 2 usage error, 130 Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments after ``varcomm``; None reads the command line.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    prog = "varcomm" if Path(sys.argv[0]).stem == "varcomm" else "python -m varcomm"
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=formatter
    )
    parser.add_argument("-V", "--version", action="version", version=version("varcomm"))
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    parsers = {}
    for name, module in _COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, formatter_class=formatter
        )
        module.add_arguments(parsers[name])
    options = parser.parse_args(arguments)
    prog = parsers[options.command].prog
    try:
        status: int = _COMMANDS[options.command].run(options, parsers[options.command])
        if sys.stdout is not None:  # None if the caller closed it
            sys.stdout.flush()
    except VarcommError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does
            print(f"{prog}: {error}", file=sys.stderr)
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
