"""``varcomm check``: compare a graph model on ranks with the same model in one process."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from varcomm.cli.arguments import positive
from varcomm.errors import ArgumentError

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Run a model on a small graph in one process and on ranks that own random nodes,
and compare outputs, loss, gradients and buffers. A difference is printed with
the submodule, the line and the fix; varcomm.testing.same_as_one_process does
the same from Python.

FILE.py:NAME is a function without arguments that returns the model. Pass to
--data a file that `varcomm partition` accepts, or a function, FILE.py:NAME,
that returns a Data or a HeteroData. Options --call, --loss and --step name
functions in the model's file.

example:
  %(prog)s model.py:make_model --data graph.pt --loss loss
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("model", metavar="FILE.py:NAME", help="function that returns the model")
    add("--data", required=True, metavar="DATA", help="a small graph: a file, or FILE.py:NAME")
    add("--call", metavar="NAME", help="call(model, data); default: by the names in forward")
    add("--loss", metavar="NAME", help="loss(out, data); default: a random combination of outputs")
    add("--step", metavar="NAME", help="step(model, data), in place of both; returns the loss")
    add("--parts", type=positive, default=3, metavar="N", help="number of ranks; default: 3")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Make model and data, compare, and print the result."""
    from varcomm.graph.graph_file import read_graph
    from varcomm.testing import same_as_one_process

    file = options.model.partition(":")[0]
    names = {"call": options.call, "loss": options.loss, "step": options.step}
    try:
        # a function, because ranks make their own: a model may not be picklable
        model = _function(options.model)
        functions: dict[str, Any] = {
            key: _function(f"{file}:{name}") for key, name in names.items() if name
        }
        is_made = ".py:" in options.data
        data = _function(options.data)() if is_made else read_graph(Path(options.data))
        print(same_as_one_process(model, data, parts=options.parts, **functions))
    except AssertionError as error:
        print(error)
        return 1
    except ArgumentError as error:
        if not error.on_all_ranks:
            parser.error(str(error))
        raise
    return 0


def _function(text: str) -> Callable[..., Any]:
    """Return the function of ``FILE.py:NAME``; its folder stays on the path for the ranks."""
    file, _, name = text.partition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not name:
        raise ArgumentError(f"{text} is not FILE.py:NAME, such as model.py:make_model.")
    sys.path.append(str(path.parent))  # last: a file must not hide a module of the ranks
    try:
        module = importlib.import_module(path.stem)
        if Path(module.__file__ or "").resolve() != path:
            raise ImportError(f"{path.stem} is the name of another module. Rename the file")
        found: Callable[..., Any] = getattr(module, name)
    except Exception as error:
        raise ArgumentError(f"{text} cannot be imported: {error!r}.") from error
    return found
