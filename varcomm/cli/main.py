"""``python -m varcomm COMMAND``: which commands there are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from varcomm.cli import simulate
from varcomm.cli.bench import command as bench
from varcomm.errors import VarcommError

__all__ = ["main"]

# A module has HELP, a line; add_arguments(parser); and run(options, parser), which returns the
# status of the process.
_COMMANDS = {
    "bench": bench,
    "simulate": simulate,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the status of the process.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those after ``python -m varcomm``; None takes them from the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m varcomm")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = {}
    for name, module in _COMMANDS.items():
        chosen[name] = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(chosen[name])
    options = parser.parse_args(arguments)
    try:
        status: int = _COMMANDS[options.command].run(options, chosen[options.command])
    except VarcommError as error:
        print(f"{chosen[options.command].prog}: {error}", file=sys.stderr)
        return 1
    return status
