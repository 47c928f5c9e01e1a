"""Numbers of ranks on which tests run: 1 and 3 in every run, 2 and 5 in the second tier."""

import inspect
from importlib import import_module

import pytest
import torch.distributed as dist

from tests.ops.comparing import assert_none

WORLDS = (1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow))


def on_ranks(*sizes, timeout=None):
    """Make a test of ``check(rank, ...)``, which each rank of worlds of these sizes runs.

    The check asserts, or returns failures. Its other arguments are fixtures and parameters of the
    test, by name; `ranks` is the number of ranks. Without sizes, `ranks` is a parameter as others.
    The timeout is that of one run.
    """

    def decorate(check):
        _, *names = inspect.signature(check).parameters

        def test(worlds, ranks=sizes[0] if sizes else None, **values):
            values |= {"ranks": ranks} if "ranks" in names else {}
            name = check.__module__, check.__name__
            results = worlds.run(ranks, _call, *name, values, timeout=timeout)
            assert_none(failures or () for failures in results)

        of_check = [name for name in names if name != "ranks"]
        shown = ["worlds", *(["ranks"] if len(sizes) != 1 else []), *of_check]
        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(n, keyword) for n in shown])
        test.check, test.__doc__, test.__module__ = check, check.__doc__, check.__module__
        return pytest.mark.parametrize("ranks", sizes)(test) if len(sizes) > 1 else test

    return decorate


def _call(rank, module, name, values):
    return getattr(import_module(module), name).check(rank, **values)


def group_of_one():
    """Return a group of this rank alone, for the results of one process."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def refused_alike(kind, call, *words, match=None):
    """Call on all ranks; assert that all raise the same error of a kind, with words; return it."""
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    assert_alike(caught.value, *words)
    return caught.value


def assert_alike(raised, *words):
    """Assert that all ranks have raised the same error, with words."""
    error, found = (type(raised).__name__, str(raised)), [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    assert found == [error] * len(found)
    for word in words:
        assert word in error[1], error
