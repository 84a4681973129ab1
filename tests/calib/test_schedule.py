"""Learning rate, lengths and validation steps."""

import numpy as np
import pytest

from rolaq.calib.schedule import learning_rate, length_of_step, validates_after


def test_warmup_reaches_the_peak_then_falls_to_zero():
    rates = np.array([learning_rate(step, 350, 2e-3, 0.05) for step in range(351)])
    warm = 18  # ceil(.05 * 350)
    np.testing.assert_allclose(rates[:warm], 2e-3 * np.arange(1, warm + 1) / warm)
    assert rates.argmax() in (warm - 1, warm)
    assert (np.diff(rates[warm:]) < 0).all()
    assert rates[350] == 0
    assert rates[349] > 0
    middle = warm + (350 - warm) // 2
    assert rates[middle] == pytest.approx(1e-3)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_runs_still_move(steps):
    assert all(learning_rate(step, steps, 1.0, 0.05) > 0 for step in range(steps))


def test_lengths_take_turns():
    assert [length_of_step(step, (512, 1024, 2048)) for step in range(4)] == [512, 1024, 2048, 512]


def test_validates_at_start_regularly_and_at_the_end():
    assert [step for step in range(61) if validates_after(step, 60, 25)] == [0, 25, 50, 60]
