"""Run the cases for GPUs: ``python3 -m tests.gpu right``, ``fast`` or ``several``.

It needs no installation of varcomm, only torch and the packages that it names if they are missing.
"""

import argparse
import importlib
import sys
from pathlib import Path

from tests.gpu.report import Page, missing_packages, run_cases

PAGES = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu"
PARTS = ("right", "fast", "several")


def main() -> int:
    """Run one part, and write its page."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--page", type=Path, help="folder for the page")
    parser.add_argument("--seconds", type=float, default=450, help="no case starts later")
    parser.add_argument("--only", default="", help="run the cases whose names contain this text")
    options = parser.parse_args()
    folder = options.page or PAGES
    if options.device == "cpu" and folder.resolve() == PAGES:
        parser.error("a rehearsal on the CPU does not replace the page of a GPU: pass --page")
    if missing := missing_packages(options.device):
        parser.error(f"{sys.executable} lacks {'; '.join(missing)}")
    module = importlib.import_module(f"tests.gpu.{options.part}")
    page = Page(folder / f"{options.part}.md", module.HEAD, options.device)
    cases = [case for case in module.cases(options.device) if options.only in case.name]
    failed = run_cases(cases, page, options.seconds, getattr(module, "JOBS", 1))
    print(f"{page.path}: {failed} of {len(cases)} cases failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
