"""The simulation's side of parity, on the model that ships with the repository."""

import json
import math

import pytest
import torch

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.common.files import find, write_json
from rolaq.common.models import load_model
from rolaq.quant.adapters.attach import attach
from rolaq.quant.artifact import Artifact
from rolaq.quant.protection import Protection
from rolaq.serve.bench import compare
from rolaq.serve.bench.compare import Divergence, Served, cache_name, groups, settle, simulate
from rolaq.serve.bench.parity import Job, cached_tokens, codes, jobs, prompt_of

transformers = pytest.importorskip("transformers", minversion="5.17")
PROMPT, OUTPUT = 90, 6
IDS = [(37 * n + n * n) % 4000 for n in range(PROMPT + OUTPUT)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return load_model(ModelConfig(name="tiny", path="pkg://rolaq.testbed/tiny", device="cpu"))[0]


@pytest.fixture(scope="module")
def method():
    return Artifact.load(find("pkg://rolaq.testbed/artifact/rolaq")).method()


def served(mode, spans, tokens=IDS, first_row=0):
    return Served(mode, list(tokens), PROMPT, {span: first_row + n for n, span in enumerate(spans)})


def decoded(first):
    """Chunks up to the prompt's end, then a token at a time."""
    return [*first, *((n, n + 1) for n in range(PROMPT, PROMPT + OUTPUT - 1))]


def test_forwards_in_chunks_give_the_logits_of_one_forward(model):
    spans = decoded([(0, 64), (64, 80), (80, 90)])
    with torch.no_grad():
        whole = model(torch.tensor([IDS])).logits[0]
    for (_, end), logits in simulate(model, [served("chunks", spans)]):
        assert torch.allclose(logits[0], whole[end - 1], atol=2e-4)


def test_a_settled_cache_holds_quantized_latents_behind_its_sinks(model, method):
    from transformers.cache_utils import DynamicCache

    ids, plain, packed = torch.tensor([IDS[:64]]), *(DynamicCache(config=model.config) for _ in range(2))
    with torch.no_grad():
        model(ids, **{cache_name(model): plain}, use_cache=True)
        with attach(model, method, Protection(4, 8, "serving")):
            model(ids, **{cache_name(model): packed}, use_cache=True)
            settle(packed)
            for index, (exact, found) in enumerate(zip(plain.layers, packed.layers, strict=True)):
                latents = exact.keys[:, 0]
                assert torch.equal(found.keys[:, 0, :4], latents[:, :4])
                want = method.reconstruct(latents[:, 4:], index)
                assert torch.allclose(found.keys[:, 0, 4:], want, atol=1e-5)
            # and it goes on: the window now holds what comes after
            model(torch.tensor([IDS[64:90]]), **{cache_name(model): packed}, use_cache=True)
            assert packed.layers[0].get_seq_length() == 90 and packed.layers[0].written == 82


def test_spans_must_be_complete():
    assert served("whole", [*decoded([(0, 90)]), (95, 96)]).spans[-1] == (94, 95)
    for broken in (decoded([(0, 64), (70, 90)]), [(0, 90)], []):
        with pytest.raises(RolaqError, match="not complete"):
            _ = served("whole", broken).spans


def test_requests_of_the_same_steps_are_one_batch():
    one, other = decoded([(0, 90)]), decoded([(0, 64), (64, 90)])
    found = list(groups([served("whole", one), served("whole", other), served("whole", one)]))
    assert sorted(map(len, found)) == [1, 2]


def test_divergence_is_the_kl_of_torch():
    torch.manual_seed(1)
    p, q = torch.randn(5, 40), torch.randn(5, 40)
    found = Divergence()
    found.add(p, q)
    want = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert found.kl == pytest.approx(want.tolist(), rel=1e-4)
    assert found.agree == (p.argmax(-1) == q.argmax(-1)).tolist()


@pytest.mark.parametrize(("shift", "ok"), [(0.0, True), (3.0, False)])
def test_rows_from_the_files_that_a_server_leaves(model, method, settings, tmp_path, monkeypatch, shift, ok):
    """A made-up server whose logits are the simulation's, one of them shifted by some nats."""
    cfg = settings(f"parity.folder={tmp_path}")
    job = Job("4+8", ("whole", "prefix"), {})
    requests = {
        "whole-0": served("whole", decoded([(0, 90)])),
        "prefix-0": served("prefix", decoded([(64, 90)]), first_row=OUTPUT),
    }
    with attach(model, method, Protection(4, 8, "serving")):
        logits = [row for one in requests.values() for _, row in simulate(model, [one])]
    logits = torch.cat(logits)
    logits[1, logits[1].argmax()] -= shift * math.log(1e3)
    path = tmp_path / f"{job.name}.logits.0"
    path.write_bytes(logits.numpy().tobytes())
    lines = [
        {"rid": rid, "start": a, "end": b, "row": row, "width": logits.shape[-1]}
        for rid, one in requests.items()
        for (a, b), row in one.rows.items()
    ]
    path.with_name(path.name + ".jsonl").write_text("\n".join(map(json.dumps, lines)))
    answers = [
        {"rid": rid, "mode": one.mode, "prompt": IDS[:PROMPT], "output": IDS[PROMPT:]}
        for rid, one in requests.items()
    ]
    write_json(tmp_path / f"{job.name}.json", answers)
    write_json(tmp_path / "jobs.json", [vars(job)])
    monkeypatch.setattr(compare, "load_model", lambda _: (model, None))
    rows = {row["mode"]: row for row in compare.run(cfg)}
    assert rows["whole"]["ok"] is ok and (rows["whole"]["agreement"] == 1) is ok
    assert rows["prefix"]["ok"] and rows["prefix"]["hits"] == 1
    assert rows["prefix"]["value"] < 1e-6 and rows["whole"]["positions"] == OUTPUT


def test_prompts_of_prefix_requests_share_whole_pages():
    text = list(range(1000, 1000 + 2 * 330))
    whole, prefix = prompt_of(text, "whole"), prompt_of(text, "prefix")
    kept = cached_tokens(330)
    assert kept == 192 and whole == text[:330] and len(prefix) == 330
    assert prefix[:kept] == whole[:kept] and prefix[kept] != whole[kept]


def test_every_budget_is_served_in_all_three_ways(settings):
    found = jobs(settings())
    assert {(job.budget, mode) for job in found if job.budget for mode in job.modes} == {
        (budget, mode) for budget in ("0+0", "4+8", "4+16") for mode in ("whole", "chunks", "prefix")
    }
    assert len({job.name for job in found}) == len(found)


def test_rows_of_codes(settings, tmp_path):
    job = Job("0+0", ("chunks",), {})
    counts = dict(writes=3, coordinates=100, differ=5, wrong=2, parameters_wrong=0, rope_wrong=0)
    with pytest.raises(RolaqError, match="compared no codes"):
        codes(settings(), [job], tmp_path)
    write_json(tmp_path / f"{job.name}.codes.json.0", counts)
    (row,) = codes(settings(), [job, Job(None, ("whole",), {})], tmp_path)
    assert (row["value"], row["on_boundary"], row["ok"], row["coordinates"]) == (2, 3, False, 100)
