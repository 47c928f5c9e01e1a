"""``varcomm COMMAND``, also ``python -m varcomm COMMAND``: which commands there are."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from varcomm.cli import inspect, partition, simulate
from varcomm.cli.bench import command as bench
from varcomm.cli.doctor import command as doctor
from varcomm.errors import VarcommError

__all__ = ["main"]

# A module has HELP, a line; DESCRIPTION; add_arguments(parser); and run(options, parser), which
# returns the status of the process.
_COMMANDS = {
    "doctor": doctor,
    "partition": partition,
    "inspect": inspect,
    "simulate": simulate,
    "bench": bench,
}

_DESCRIPTION = "Graphs and tensors in uneven shards: look at what there is, and prepare a run."
_EPILOG = """\
`%(prog)s COMMAND --help` tells of a command, and has an example.

status: 0 all is well, 1 it failed, 2 it was called wrongly, 130 Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the status of the process.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those after ``varcomm``; None takes them from the command line.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_called(), description=_DESCRIPTION, epilog=_EPILOG, formatter_class=formatter
    )
    parser.add_argument("-V", "--version", action="version", version=version("varcomm"))
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    chosen = {}
    for name, module in _COMMANDS.items():
        chosen[name] = commands.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, formatter_class=formatter
        )
        module.add_arguments(chosen[name])
    options = parser.parse_args(arguments)
    prog = chosen[options.command].prog
    try:
        status: int = _COMMANDS[options.command].run(options, chosen[options.command])
        if sys.stdout is not None:  # which it is where the caller has closed it
            sys.stdout.flush()
    except VarcommError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # that is a reader who has seen enough: `| head`
            print(f"{prog}: {error}", file=sys.stderr)
        _drop_output()
        return 1
    return status


def _drop_output() -> None:
    """Forget what stdout does not take, or Python complains of it when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _called() -> str:
    """Return by what words this process was called."""
    return "varcomm" if Path(sys.argv[0]).stem == "varcomm" else "python -m varcomm"
