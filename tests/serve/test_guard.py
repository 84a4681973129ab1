"""Token ids that SGLang does not check itself."""

from types import SimpleNamespace

import pytest

from rolaq.serve.guard import check_ids

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


@pytest.mark.parametrize("ids", [None, [], [0], [5, 99, 0]])
def test_ids_of_the_vocabulary_pass(ids):
    assert check_ids(None, MANAGER, None, ids) is None


@pytest.mark.parametrize(("ids", "named"), [([3, 100], "100"), ([-1, 5], "-1"), ([1, 2**40], str(2**40))])
def test_others_are_named(ids, named):
    with pytest.raises(ValueError, match=f"contain {named}, which is not in the vocabulary"):
        check_ids(None, MANAGER, None, ids)
