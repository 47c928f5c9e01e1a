"""The text, its tokens, and a short training: on any number of ranks as on one."""

import contextlib
import io
import os
import subprocess
import sys
from functools import cache, partial

import pytest
import torch

from tests.examples.loading import EXAMPLES
from tests.examples.loading import example as load
from tests.worlds import WORLDS

FOLDER = EXAMPLES / "text"
SMALL = ["--layers", "1", "--head-size", "4", "--length", "16", "--batch", "2", "--sample", "20"]

example = partial(load, "text")


@cache
def text():
    return example("corpus").text()


@pytest.mark.slow
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


def options(folder, *more):
    return example("train").parsed([*SMALL, "--picture", str(folder / "text.png"), *more])


def compare(rank, folder, in_parts):
    train = example("train")
    torch.manual_seed(0)
    ids = torch.randint(131, (2000,))
    chosen = options(folder, "--check", "5", *["--sequence-parallel"] * in_parts)
    return train.compare(train.new_model(chosen, 131).double(), ids, chosen)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("ranks", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(worlds, tmp_path, ranks, in_parts):
    answers = worlds.run(ranks, compare, tmp_path, in_parts)
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


def losses_of_training(rank, folder):
    train, ids = (
        example("train"),
        example("corpus").Vocabulary(text()[:20_000]).encode(text()[:80_000]),
    )
    chosen = options(folder, "--head-size", "8", "--rate", "0.01", "--batch", "8")
    model = train.new_model(chosen, 131)
    losses = list(train.fit(model, ids, chosen, 150))
    known = train.by_frequency(ids, ids, 131)
    return losses[0], sum(losses[-20:]) / 20, known


@pytest.mark.slow
def test_training_learns_more_than_frequencies(worlds, tmp_path):
    first, last, known = worlds.run(1, losses_of_training, tmp_path)[0]
    assert first > known > last + 0.3


def differing(rank, folder):
    train = example("train")
    before, train.compare = train.compare, lambda *args: (0.0, 1e-2)
    try:
        more = ["--steps", "1", "--sample", "1", "--check", "3"]
        return run_main(rank, [*SMALL, "--picture", str(folder / "text.png"), *more])
    finally:
        train.compare = before


def test_a_difference_is_told(worlds, tmp_path):
    ((code, printed),) = worlds.run(1, differing, tmp_path)
    assert code == 1
    assert printed.endswith("\nNOT one answer\n")
