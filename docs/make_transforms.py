"""Write ``transforms.md``: what transforms of torch make of what communicates.

Run it from the root of the repository: ``PYTHONPATH=. python docs/make_transforms.py``. It runs
every operation under every transform, on one to three ranks, and takes a minute.
"""

from pathlib import Path

from tests.transforms.operations import OPERATIONS
from tests.transforms.table import found, rows_and_notes
from varcomm import Ranks

PAGE = Path(__file__).with_name("transforms.md")

HEAD = """\
# Transforms of torch

What works gives what one process gives, in fp64 and on one to three ranks of uneven sizes, also
where the loss of one rank is linear. What is refused is an error on every rank that says why. This
page is made by `docs/make_transforms.py`, which runs all of it; a test runs it again.

"""

TAIL = """
Reasons:

{notes}

[gpu] needs a GPU, and this page is made without one: `tests/transforms/test_cuda_graphs.py` is
there for machines that have one.

## What to know

- A **batch** of `vmap` is one more dimension of features: it travels in one call, with as many
  messages as one entry has. Ranks compare the sizes of their batches before, always, which costs a
  round of messages. In linear layers and cross entropy the entries of a batch are more rows.
- Derivatives are those of the sum of all ranks' losses, as in backward. So `jacrev` of an output
  gives, for each of its elements, the gradient of the *sum over ranks* of that element, and
  `jacfwd` moves the same element of all ranks' inputs at once. Both batch by what this rank has:
  where ranks have different numbers of elements, that is an error on all of them. Take `vjp` or
  `jvp` along as many directions on every rank.
- Where only the root has a tensor (`broadcast`, `scatter_v`), and a transform reaches it, other
  ranks pass one too, that depends on their arguments in the same way; it is not read.
- All ranks transform alike: inside of `varcomm.debug()` other programs are an error.
- **autocast** casts nothing that only moves: results have the dtype of what was passed. Linear
  layers, and what models compute, are cast as torch casts its own.
- **Fake tensors** have the shapes, strides and dtypes of real results, in forward and backward,
  without a message. A plan may be made before the mode is entered.
- Inside of functions that **`torch.compile`** compiles, transforms of `torch.func` run as they are,
  at a break of the graph: with `fullgraph=True` that is an error of the compiler.
"""


def page(merged) -> str:
    """Return the page."""
    lines, notes = rows_and_notes(merged)
    return HEAD + "\n".join(lines) + "\n" + TAIL.format(notes="\n".join(notes))


def main() -> None:
    """Write the page."""
    merged = {}
    with Ranks(1) as one, Ranks(2) as two, Ranks(3) as three:
        pools = {1: one, 2: two, 3: three}
        for column, names in OPERATIONS.items():
            for name in names:
                told = found(lambda ranks, *job: pools[ranks].run(*job), column, name)
                merged |= {(column, title, name): text for title, text in told.items()}
    PAGE.write_text(page(merged))


if __name__ == "__main__":
    main()
