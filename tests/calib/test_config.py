"""Settings that cannot work are refused before anything is loaded."""

import pytest
from pydantic import ValidationError

from rolaq.calib.config import CalibConfig, QuantConfig
from rolaq.common.errors import RolaqError


def test_lengths_follow_the_context():
    assert CalibConfig().for_context(131072).lengths == (512, 2048, 4096)
    assert CalibConfig().for_context(4096).lengths == (512, 2048, 4096)
    assert CalibConfig().for_context(2048).lengths == (512, 1024, 2048)
    assert CalibConfig(lengths=(1024, 256, 512)).for_context(2048).lengths == (256, 512, 1024)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": (500, 1000, 2000)}, "not a multiple"),
        ({"lengths": (16, 512, 2048)}, "nothing to score"),
        ({"lengths": (512, 2048)}, "one weight per length"),
        ({"steps": 0}, "greater than 0"),
        ({"fit_tokens": 9000}, "less than or equal to 8192"),
        ({"objective": "mse"}, "kl"),
        ({"learning_rate": 1}, "Extra inputs"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        CalibConfig(**settings)


def test_a_length_beyond_the_context_is_refused():
    with pytest.raises(RolaqError, match="4096 tokens exceed the model's context of 2048"):
        CalibConfig(lengths=(512, 2048, 4096)).for_context(2048)


def test_unknown_rotation_suggests():
    with pytest.raises(
        RolaqError, match=r"Unknown quant.rotation 'jont'. Did you mean: joint.*\? Available: cayley"
    ):
        QuantConfig(rotation="jont").check()


def test_threshold_bounds():
    with pytest.raises(ValidationError, match=r"threshold_init 0.98\d* must lie in \[0.5, 0.9\]"):
        QuantConfig(spec={"threshold_max": 0.9})
