"""The command `bench`, at sizes that show nothing about speed."""

import json

import pytest

from tests.transport.processes import torchrun
from varcomm.cli.main import main
from varcomm.cli.workload import OPERATIONS

COLUMNS = "operation pass ranks dtype bytes shards us algbw busbw wire"
SOME = "all_gather_v,indexed_all_to_all_v,halo"
ALL = ",".join(OPERATIONS)


def results(path):
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize(
    ("worlds", "operations", "engine"),
    [
        ("2", "all_gather_v,halo", "gloo"),
        pytest.param("1,3", SOME, "gloo", marks=pytest.mark.slow),
        pytest.param("2", ALL, "gloo", marks=pytest.mark.slow),
        pytest.param("2", ALL, "mpi", marks=pytest.mark.slow),
    ],
)
def test_table_and_file(worlds, operations, engine, tmp_path, capsys):
    file = tmp_path / "run.json"
    chosen = ["--world", worlds, "--operations", operations, "--engine", engine]
    tiny = ["--sizes", "15360", "--skews", "even,1:2", "--repeat", "1", "--dtypes", "float32"]
    assert main(["bench", *chosen, *tiny, "--json", str(file)]) == 0
    head, *lines, blank, last = capsys.readouterr().out.splitlines()
    assert blank == ""
    assert last.startswith(f"{len(lines)} cases: busbw ")
    assert last.endswith(f" {len(lines)} of {len(lines)} send the fewest possible bytes")
    assert head.split() == COLUMNS.split()
    assert [line.split()[:3] for line in lines] == [
        [name, direction, size]
        for size in worlds.split(",")
        for name in operations.split(",")
        for direction in ("forward", "backward")
        for _ in ("even", "1:2")
    ]
    found = results(file)
    assert len(found) == len(lines)
    for result in found:
        assert result["wire"] == 1.0
        assert result["count"] * 4 == result["nbytes"]
        for name, nbytes in (("algbw", result["nbytes"]), ("busbw", result["busiest"])):
            assert result[name] == pytest.approx(nbytes / result["seconds"] / 1e9)
        if result["skew"] == "even" and result["operation"] != "halo":
            # nccl-tests' factor; an exchange keeps no rows, so its factor is 1
            size, is_exchange = result["world"], result["operation"] == "indexed_all_to_all_v"
            factor = 1 if is_exchange and size > 1 else 1 - 1 / size
            assert result["busiest"] == pytest.approx(factor * result["nbytes"])


@pytest.mark.slow
def test_ranks_of_a_job(tmp_path):
    file = tmp_path / "run.json"
    bench = "-m", "varcomm", "bench", "--operations", "gather_v", "--repeat", "1"
    done = torchrun(*bench, "--sizes", "768", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("operation") == 1
    assert {result["world"] for result in results(file)} == {2}
