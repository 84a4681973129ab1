"""Throughput, averages and percentiles against closed forms and NumPy."""

import numpy as np
import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve.bench.stats import Bound, Timeline, first_tokens, over_interval, percentile, throughput


def line(start, rate, tokens, step=8):
    """A request whose first token comes at ``start`` and that makes ``rate`` tokens a second."""
    counts = [1, *range(1 + step, tokens + 1, step)]
    return Timeline(0.0, [(start + (count - 1) / rate, count) for count in counts])


@pytest.mark.parametrize("step", [1, 8])
def test_throughput_of_steady_requests_is_the_sum_of_their_rates(step):
    lines = [line(0.0, 100, 400, step), line(0.7, 50, 400, step)]
    assert throughput(lines, drop=16) == pytest.approx(150, rel=1e-9)


def test_throughput_leaves_out_one_stall():
    steady = line(0.0, 100, 801)
    stalled = Timeline(0.0, [(time + (3.0 if count > 700 else 0.0), count) for time, count in steady.samples])
    assert throughput([stalled], drop=16) == pytest.approx(100, rel=1e-6)


def test_throughput_needs_a_time_when_all_decode():
    with pytest.raises(RolaqError, match="at the same time"):
        throughput([line(0.0, 100, 64), line(50.0, 100, 64)], drop=16)
    with pytest.raises(RolaqError, match="ended after"):
        throughput([line(0.0, 100, 8)], drop=16)


def test_interval_is_exact_where_a_step_is_linear_in_the_context():
    rate = lambda n: 1 / (1e-3 + 2e-9 * n)  # noqa: E731
    begin, end = 131072, 262144
    # total time is the integral of a linear function: the step at the middle, times the tokens
    want = rate((begin + end) / 2)
    for points in ([begin, end], [1024, 65536, 150000, 200000, 300000]):
        assert over_interval({n: rate(n) for n in points}, begin, end) == pytest.approx(want, rel=1e-12)


def test_interval_must_be_covered():
    with pytest.raises(RolaqError, match="not covered"):
        over_interval({1024: 5.0, 4096: 4.0}, 2048, 8192)


@pytest.mark.parametrize("n", [1, 4, 16, 100, 256])
@pytest.mark.parametrize("q", [50, 99])
def test_percentile_is_the_nearest_rank(n, q):
    values = np.random.default_rng(n).random(n)
    assert percentile(list(values), q) == np.percentile(values, q, method="inverted_cdf")


def test_first_tokens_of_a_part_of_a_burst():
    times = [float(n + 1) for n in range(256)]
    assert first_tokens(times[::-1], 16, 99, 999.0) == Bound(16.0)
    assert first_tokens(times, 256, 50, 999.0) == Bound(128.0)
    cut = [time if time <= 100 else None for time in times]
    assert first_tokens(cut, 64, 99, 100.0) == Bound(64.0)
    assert first_tokens(cut, 256, 99, 100.0) == Bound(100.0, at_least=True)
