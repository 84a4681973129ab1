"""When greedy outputs count as the same."""

import pytest

from rolaq.serve.bench.agree import Greedy, best, count, verdict
from rolaq.serve.bench.proofs import Agreement

SAME = Agreement(margin=0.5, drift=0.1)
REFERENCE = Greedy([5, 6, 7, 8], [-0.1, -0.2, -0.3, -0.4], [3.0, 2.0, 0.3, 4.0])


@pytest.mark.parametrize(
    ("ids", "logprobs", "want"),
    [
        ([5, 6, 7, 8], [-0.1, -0.2, -0.3, -0.4], "same"),
        ([5, 6, 7, 8], [-0.15, -0.25, -0.35, -0.45], "same"),
        ([5, 6, 9, 1], [-0.1, -0.2, -0.9, -5.0], "tie"),
        ([5, 9, 9, 1], [-0.1, -2.2, -0.9, -5.0], "changed"),
        ([5, 6, 7, 8], [-0.6, -0.2, -0.3, -0.4], "changed"),
        ([5, 6, 7], [-0.1, -0.2, -0.3], "changed"),
        ([9, 6, 7, 8], [-3.1, -0.2, -0.3, -0.4], "changed"),
    ],
)
def test_verdicts(ids, logprobs, want):
    assert verdict(REFERENCE, Greedy(ids, logprobs, [1.0] * len(ids)), SAME)[0] == want


def test_the_mildest_of_several_references_counts():
    other = Greedy([5, 9, 1, 1], [-0.1, -0.2, -0.3, -0.4], [1.0] * 4)
    assert best([REFERENCE], other, SAME)[0] == "changed"
    assert best([REFERENCE, other], other, SAME) == ("same", 0.0)
    found = count([("same", 0.01), ("same", 0.03), ("tie", 0.02)])
    assert found == {"same": 2, "tie": 1, "changed": 0, "drift": 0.03}


def test_an_answer_with_logprobs():
    info = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 3, None]], [[-0.25, 8, None], [-4.25, 2, None]]],
    }
    assert Greedy.of({"meta_info": info}) == Greedy([7, 8], [-0.5, -0.25], [1.0, 4.0])
