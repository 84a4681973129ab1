"""What another attempt can mend: memory that ran out, cuDNN's attention that failed."""

import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.eval.batching import CUDNN_FAILED, fit, recovering


class Model:
    """As much of a language model as batching looks at."""

    def __init__(self, rows=8):
        self.batch_size_per_gpu, self.device = rows, torch.device("cpu")

    @property
    def batch_size(self):
        return self.batch_size_per_gpu


def attempt(lm, error):
    with recovering(lm):
        raise error
    return "goes on"


def test_half_the_batch_until_one_row_is_left():
    lm = Model(rows=5)
    sizes = []
    for _ in range(2):
        assert attempt(lm, torch.OutOfMemoryError("full")) == "goes on"
        sizes.append(lm.batch_size)
    assert sizes == [2, 1]
    with pytest.raises(RolaqError, match="one row does not fit"):
        attempt(lm, torch.OutOfMemoryError("full"))


def test_cudnn_is_turned_off_once(capsys):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    error = RuntimeError(f"Expected {CUDNN_FAILED}.execute(...).is_good() to be true")
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert attempt(Model(), error) == "goes on"
        assert not torch.backends.cuda.cudnn_sdp_enabled() and "cuDNN" in capsys.readouterr().err
        with pytest.raises(RuntimeError, match=CUDNN_FAILED):  # a second time it is something else
            attempt(Model(), error)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_other_failures_are_not_hidden():
    with pytest.raises(RuntimeError, match="shape"):
        attempt(Model(), RuntimeError("shape mismatch"))


@pytest.mark.parametrize(("longest", "rows"), [(512, 8), (4096, 1), (16384, 1)])
def test_rows_on_a_cpu(longest, rows):
    assert fit(Model(), longest, 0) == rows
