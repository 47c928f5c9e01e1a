"""What the examples share."""

import pytest
import torch

from tests.examples.loading import example


def rates(steps, rise):
    """The rates of all steps; a training asks for the next one also after the last."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    schedule = example(".", "common").one_cycle(optimizer, 0.5, steps, rise)
    found = []
    for _ in range(steps):
        found += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("rise", [0.15, 0.2, 0.3])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 15])
def test_trainings_of_any_length_have_rates(steps, rise):
    found = rates(steps, rise)
    assert len(found) == steps
    assert all(0 < rate <= 0.5 for rate in found)
    top = found.index(max(found))
    assert found == sorted(found[:top]) + sorted(found[top:], reverse=True), "up, then down"


@pytest.mark.parametrize("rise", [0.15, 0.2, 0.3])
def test_rates_rise_for_a_share_of_the_steps_and_fall_to_nothing(rise):
    found = rates(200, rise)
    top = found.index(max(found))
    assert top == pytest.approx(200 * rise - 1, abs=1)
    assert max(found) == pytest.approx(0.5, rel=1e-3)
    assert found[:top] == sorted(found[:top])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert found[-1] < 1e-5


def test_a_picture_that_can_be_written_leaves_nothing_until_it_is(tmp_path):
    hindrance = example(".", "command_line").hindrance
    assert hindrance(tmp_path / "new" / "a.png") is None
    assert not (tmp_path / "new" / "a.png").exists()
    (tmp_path / "old.png").write_text("drawn before")
    assert hindrance(tmp_path / "old.png") is None
    assert (tmp_path / "old.png").read_text() == "drawn before"
    assert "cannot write" in hindrance(tmp_path / "old.png" / "a.png")
    assert "cannot write" in hindrance(tmp_path)
