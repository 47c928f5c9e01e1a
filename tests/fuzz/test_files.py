"""Altered files, drawn at random: `make fuzz` reads a hundred thousand."""

import pytest

from tests.fuzz import files


@pytest.mark.parametrize("kind", files.SAVED)
def test_altered_files_are_refused(worlds, kind, tmp_path):
    refused, wrong = worlds.run(1, files.attempts, tmp_path, kind, 300, 0)[0]
    assert wrong == []
    assert refused > 150
