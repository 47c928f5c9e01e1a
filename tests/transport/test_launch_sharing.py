"""Ranks that others may use as well: threads, forked children, and modules that ranks import."""

import threading
import time

import pytest

import varcomm
from tests.transport.processes import script

WITHOUT_GUARD = """
from varcomm.transport.launch import launch
def number(rank): return rank
launch(number, 1)
"""

FORK = """
import os, sys, time
from varcomm.transport.launch import Ranks
def pid(rank): return os.getpid()
with Ranks(2) as pool:
    pids = pool.run(pid)
    child = os.fork()
    if child == 0:
        {act}
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, pool.run(pid) == pids)
"""


def test_threads_wait_for_each_other():
    def slow(rank, name):
        time.sleep(0.2)
        return name, rank

    results = {}
    with varcomm.Ranks(2, timeout=60) as pool:
        threads = [
            threading.Thread(target=lambda n=n: results.update({n: pool.run(slow, n)}))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: [(n, 0), (n, 1)] for n in range(3)}


@pytest.mark.parametrize(
    "act",
    [
        "pass",  # leaves the block, which closes the pool
        "os.closerange(1, 3); del pool; import gc; gc.collect()",
        "assert not set(pool.run(pid)) & set(pids)",  # has ranks of its own
    ],
)
def test_forked_child_leaves_the_ranks_alone(tmp_path, act):
    with script(tmp_path, FORK.format(act=act)) as parent:
        out, err = parent.communicate(timeout=60)
    assert (out, err) == ("0 True\n", "")


def test_module_without_guard_is_refused_in_a_rank(worlds, tmp_path):
    (tmp_path / "unguarded.py").write_text(WITHOUT_GUARD)

    def import_it(rank, folder):
        import sys

        sys.path.insert(0, folder)
        try:
            import unguarded  # noqa: F401
        except varcomm.LaunchError as error:
            return str(error)
        finally:
            sys.path.remove(folder)

    for rank, told in enumerate(worlds.run(2, import_it, str(tmp_path))):
        assert f"rank {rank} imports module 'unguarded', which launches ranks" in told
        assert 'if __name__ == "__main__":' in told


def test_script_that_its_ranks_import_does_not_launch_without_end(tmp_path):
    code = """
import varcomm
def import_script(rank):
    import script
varcomm.launch(import_script, 2, timeout=60)
"""
    with script(tmp_path, code) as parent:
        assert parent.wait(60) == 1
        assert "imports module 'script', which launches ranks" in parent.stderr.read()


def test_function_of_a_rank_launches_ranks(worlds):
    def nested(rank):
        # run as an example of a docstring is: a module, but one that nobody imports
        exec("import varcomm; answer = varcomm.launch(lambda rank: rank, 2)", scope := {})
        return rank, scope["answer"]

    assert worlds.run(2, nested) == [(0, [0, 1]), (1, [0, 1])]
