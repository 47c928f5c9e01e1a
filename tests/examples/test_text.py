"""The text, its tokens, and a short training: on any number of ranks as on one."""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "text"
SMALL = ["--layers", "1", "--head-size", "4", "--length", "16", "--batch", "2", "--sample", "20"]


@cache
def example(name):
    """Import a module of the example, whose names are those of other examples as well."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # for what it imports itself
    spec = importlib.util.spec_from_file_location(f"text_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def text():
    return example("corpus").text()


def test_the_text_is_documentation_in_plain_characters():
    assert 300_000 < len(text()) < 2_000_000
    assert set(text()) == set(example("corpus").CHARACTERS)
    assert text().count("Return a shallow copy") < 10, "docstrings come once"
    assert "Command-line parsing library" in text()
    assert "Python" in text()


def test_the_text_is_the_same_in_another_process():
    code = "import corpus, zlib; print(zlib.crc32(corpus.text().encode()))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=FOLDER,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_tokens():
    vocabulary = example("corpus").Vocabulary(text()[:20_000])
    assert len(vocabulary) == len(set(vocabulary.tokens)) == 131
    part = text()[50_000:60_000]
    ids = vocabulary.encode(part)
    assert vocabulary.decode(ids) == part
    assert len(ids) < 0.8 * len(part)
    assert 0 <= ids.min() <= ids.max() < 131
    assert vocabulary.decode(torch.arange(131)).startswith(example("corpus").CHARACTERS)


def test_pairs_of_pairs():
    vocabulary = example("corpus").Vocabulary("abcabcabcabcabx", size=98)
    assert [vocabulary.decode(torch.tensor([number])) for number in (96, 97)] == ["ab", "abc"]
    assert vocabulary.encode("abcab").tolist() == [97, 96]


def options(*more):
    return example("train").parsed([*SMALL, *more])


def compare(rank, in_parts):
    train = example("train")
    torch.manual_seed(0)
    ids = torch.randint(131, (2000,))
    chosen = options(*["--sequence-parallel"] * in_parts)
    model = train.new_model(chosen, 131).double()
    return train.differences(model, ids, chosen, 5)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_and_gradients_are_those_of_one_process(worlds, ranks, in_parts):
    answers = worlds.run(ranks, compare, in_parts)
    assert answers == answers[:1] * ranks, "ranks differ"
    losses, gradients = answers[0]
    assert losses <= 1e-10
    assert gradients <= 1e-12


def run_main(rank, arguments):
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),  # the bar
    ):
        code = example("train").main(arguments)
    return code, printed.getvalue()


@pytest.mark.parametrize("more", [[], ["--sequence-parallel"]], ids=["", "in parts"])
def test_main(worlds, more):
    (code, printed), other = worlds.run(2, run_main, [*SMALL, "--steps", "3", *more])
    assert code == 0
    assert other == (0, ""), "only the first rank prints"
    assert re.search(r"\d{3},\d{3} characters, \d{3},\d{3} tokens, 131 of them different", printed)
    assert re.search(r"\[66, 65\] tokens, \[3, 2\] heads and \[\d+, \d+\] parameters a", printed)
    assert re.search(r"3 steps in \d+ s\. Loss on held-out text, in nats a token:", printed)
    for name in ("model", "frequency of tokens", "all tokens alike"):
        assert re.search(rf"\d\.\d\d\d  {name}", printed)
    assert re.search(r"--- sample 2 ---\nReturn", printed)


def losses_of_training(rank):
    train, ids = (
        example("train"),
        example("corpus").Vocabulary(text()[:20_000]).encode(text()[:80_000]),
    )
    chosen = options("--head-size", "8", "--rate", "0.01", "--batch", "8")
    model = train.new_model(chosen, 131)
    losses = list(train.fit(model, ids, chosen, 150))
    known = train.by_frequency(ids, ids, 131)
    return losses[0].item(), torch.stack(losses[-20:]).mean().item(), known


def test_training_learns_more_than_frequencies(worlds):
    first, last, known = worlds.run(1, losses_of_training)[0]
    assert first > known > last + 0.3


def refused(rank, arguments):
    with contextlib.redirect_stderr(io.StringIO()) as told, pytest.raises(SystemExit, match=r"^2$"):
        example("train").main(arguments)
    return told.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], r"argument --steps: need a whole number from 1 on, got '0'"),
        (["--head-size", "5"], r"argument --head-size: need an even number, got '5'"),
        (["--length", "20000"], r"argument --length: need less than 20000, got 20000"),
    ],
)
def test_wrong_options_are_told_once(worlds, arguments, message):
    told, other = worlds.run(2, refused, arguments)
    assert re.search(message, told)
    assert other == ""


def test_a_difference_is_told(monkeypatch):
    train, said = example("train"), []
    monkeypatch.setattr(train, "differences", lambda *args: (0.0, 1e-2))
    assert not train.check(torch.zeros(5), 131, options("--check", "3"), said.append)
    assert said[-1] == "NOT one answer"
    assert isinstance(options("--check"), argparse.Namespace)


def test_torchrun():
    """As the example's first lines say: with --check, ranks are compared with one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(FOLDER / "train.py"), *SMALL]
    command += ["--steps", "2", "--check", "3"]
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command,
        env=environ | {"OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^one answer$", done.stdout, re.MULTILINE), done.stdout
