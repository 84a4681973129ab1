"""The six benchmarks: the harness's own numbers, resumed runs, stamped limits, clear errors."""

import json

import datasets
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from rolaq.common.config import resolve
from rolaq.common.errors import RolaqError
from rolaq.eval.__main__ import run as evaluate
from rolaq.eval.benchmarks import BENCHMARKS, FILES
from rolaq.eval.completions import evaluated_by
from rolaq.eval.config import EvalConfig
from rolaq.eval.harness import Harness
from rolaq.eval.lm import QuantizedLM
from rolaq.eval.methods import build
from rolaq.eval.paired import unpacked
from rolaq.eval.sandbox import CodeEval
from rolaq.quant.protection import Protection

from .benchmark_files import TASKS, make

SHOTS = {"mmlu": 1, "cmmlu": 1, "triviaqa": 2, "gsm8k": 2, "humaneval": 0, "mbpp": 1}


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(HFLM, "max_gen_toks", property(lambda self: 8))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    make(folder)
    return folder


def plain(name, root, target, monkeypatch):
    """lm-eval as anyone would call it, its data sets read by `datasets` itself."""

    def local(path, name=None, **options):
        splits = {split: str(root / file.format(name)) for split, file in FILES[path].items()}
        return datasets.DatasetDict(
            {
                split: datasets.Dataset.from_list([json.loads(x) for x in open(file)])
                for split, file in splits.items()
            }
        )

    monkeypatch.setattr(datasets, "load_dataset", local)
    benchmark = BENCHMARKS[name]
    with evaluated_by(CodeEval()):
        manager = TaskManager(include_path=str(TASKS / benchmark.folder), include_defaults=False)
        found = simple_evaluate(
            HFLM(pretrained=target.model, tokenizer=target.tokenizer, batch_size=4),
            tasks=[benchmark.task], task_manager=manager, num_fewshot=SHOTS[name], limit=1, bootstrap_iters=0,
            confirm_run_unsafe_code=True, verbosity="ERROR",
        )  # fmt: skip
    return found, found["results"][benchmark.task]


@pytest.mark.parametrize(
    "name", [*[n for n in SHOTS if n != "humaneval"], pytest.param("humaneval", marks=pytest.mark.slow)]
)
def test_bf16_is_the_plain_harness(name, root, target, monkeypatch):
    harness = Harness(name, [root], SHOTS[name], 1, CodeEval())
    lm = QuantizedLM(target.model, target.tokenizer, 4)
    harness.prepare(lm)
    (exact,) = build(["bf16"], target, {})
    outcome = harness.run(lm.use(exact.method, Protection()))
    found, numbers = plain(name, root, target, monkeypatch)
    key = "pass_at_1,none" if name == "mbpp" else BENCHMARKS[name].score  # MBPP's answers are cut by us alone
    samples = [item for task in harness.loaded["tasks"] for item in found["samples"][task]]
    theirs = [one for item in samples if item["filter"] == key.split(",")[1] for one in item["resps"]]
    assert [r.resps for task in harness.loaded["tasks"].values() for r in task.instances] == theirs
    assert outcome.score == pytest.approx(100 * numbers[key], abs=1e-12)


def composed(workspace, root, tmp_path, *more):
    GlobalHydra.instance().clear()
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        return compose(
            "eval",
            [
                "suite=paper", "model=auto", f"model.path={workspace}/model", "data=local", f"data.root={root}",
                "tracking=none", "threads=1", f"output={tmp_path}", f"artifacts={workspace}/artifacts",
                'protect.budgets=["0+0","4+16"]', "methods=[bf16,kvarn,rolaq]",
                "suite.benchmarks.tasks=[triviaqa,gsm8k]", "suite.benchmarks.shots={triviaqa: 2, gsm8k: 1}", *more,
            ],
        )  # fmt: skip


def rows_of(folder):
    return json.loads((folder / "model" / "paper.json").read_text())["tasks"]


def test_run_resumes_at_the_task_where_it_stopped(workspace, root, tmp_path, monkeypatch):
    calls, original = [], Harness.run

    def stops(self, lm):
        calls.append(self.task)
        if len(calls) == 7:  # bf16 once, two methods at two budgets: five runs of triviaqa, then gsm8k
            raise KeyboardInterrupt
        return original(self, lm)

    monkeypatch.setattr(Harness, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(composed(workspace, root, tmp_path))
    assert [row["task"] for row in rows_of(tmp_path)] == ["triviaqa"] * 6 + ["gsm8k"]
    evaluate(composed(workspace, root, tmp_path))
    assert calls == ["triviaqa"] * 5 + ["gsm8k"] * 7
    rows = rows_of(tmp_path)
    assert len(rows) == 12 and all(row["limit"] is None and row["n"] == 2 for row in rows)
    evaluate(composed(workspace, root, tmp_path))
    assert len(calls) == 12
    text = (tmp_path / "model" / "paper.md").read_text()
    assert "Accuracy, %, 0+0" in text and "McNemar" in text and "LIMITED" not in text


def test_limited_runs_are_stamped_and_stand_beside_full_ones(workspace, root, tmp_path):
    more = ("methods=[bf16,rolaq]", "suite.benchmarks.tasks=[triviaqa]", 'protect.budgets=["0+0"]')
    evaluate(composed(workspace, root, tmp_path, *more, "suite.benchmarks.limit=1"))
    assert "LIMITED in 1 of 1 tasks" in (tmp_path / "model" / "paper.md").read_text()
    assert "TriviaQA (first 1)" in (tmp_path / "model" / "paper.md").read_text()
    evaluate(composed(workspace, root, tmp_path, *more))
    rows = {(row["method"], row["limit"], row["n"]) for row in rows_of(tmp_path)}
    assert rows == {(method, *size) for method in ("bf16", "rolaq") for size in ((1, 1), (None, 2))}
    assert "LIMITED" not in (tmp_path / "model" / "paper.md").read_text()


ERRORS = {
    "suite.benchmarks.tasks=[mmlu,gsm9k]": "Unknown benchmark 'gsm9k'. Did you mean: gsm8k",
    "+suite.benchmarks.shots.humanevil=3": "Unknown benchmark 'humanevil'. Did you mean: humaneval",
    "suite.benchmarks.limit=0": "must be at least 1",
    "suite.benchmarks.root=/nowhere": "triviaqa/train.jsonl is missing: looked for it in /nowhere, /nowhere/eval",
    "suite.benchmarks.shots.triviaqa=50": "suite.benchmarks.shots of triviaqa: ",
    "methods=[oscar-best-gain]": "oscar-best-gain needs the gain sweep",
}


@pytest.mark.parametrize("argument", ERRORS)
def test_user_errors(workspace, root, tmp_path, argument):
    with pytest.raises(RolaqError) as error:
        evaluate(composed(workspace, root, tmp_path, argument))
    assert ERRORS[argument] in str(error.value) and "\n" not in str(error.value)


def test_hub_out_of_reach_says_what_to_do(workspace, root, tmp_path, monkeypatch):
    def fails(*arguments, **options):
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(
        RolaqError, match="cannot load mandarjoshi/trivia_qa from the .* hub .no route .*data.root="
    ):
        evaluate(composed(workspace, root, tmp_path, "suite.benchmarks.root=hub"))


def test_damaged_file_names_its_line(workspace, root, tmp_path):
    make(tmp_path / "data")
    path = tmp_path / "data" / "triviaqa" / "validation.jsonl"
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(RolaqError, match=r"validation.jsonl, line 3 is not JSON"):
        evaluate(composed(workspace, tmp_path / "data", tmp_path))


def test_results_of_another_version_are_refused_and_kept(workspace, root, tmp_path):
    path = tmp_path / "model" / "paper.json"
    path.parent.mkdir()
    path.write_text('{"format_version": 99, "tasks": []}')
    with pytest.raises(RolaqError, match="is from another version of RoLaQ: move it away"):
        evaluate(composed(workspace, root, tmp_path))
    assert json.loads(path.read_text()) == {"format_version": 99, "tasks": []}


def test_padding_does_not_reach_a_method_with_statistics_over_tokens(target, workspace):
    """KVarN's answers in a padded batch are those of each row alone."""
    (entry,) = build(["kvarn"], target, {})
    texts = [("a" * n, " b") for n in (150, 40, 90)]
    requests = [type("Request", (), {"args": pair}) for pair in texts]
    found = []
    for rows in (3, 1):
        lm = QuantizedLM(target.model, target.tokenizer, rows).use(entry.method, Protection.parse("4+16"))
        found.append([value for value, _ in lm.loglikelihood(requests, disable_tqdm=True)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_encodings_are_those_of_the_harness(target):
    lm, other = (QuantizedLM(target.model, target.tokenizer, 1) for _ in range(2))
    pairs = [
        ("Question: ä?\nAnswer:", " A"),
        ("Question: ä?\nAnswer:", " BC"),
        ("x", "y"),
        ("答案：", "A"),
        ("z ", "q"),
    ]
    from rolaq.eval.encoding import encode_pairs

    encode_pairs(lm, lm._pairs, pairs)
    assert len(lm._pairs) == 4  # the trailing space is left to the harness
    assert [lm._encode_pair(*pair) for pair in pairs] == [other._encode_pair(*pair) for pair in pairs]


def test_answers_are_kept_item_by_item(workspace, root, tmp_path):
    more = (
        "methods=[rolaq]",
        "suite.benchmarks.tasks=[mmlu]",
        'protect.budgets=["0+0"]',
        "suite.benchmarks.shots={mmlu: 1}",
    )
    evaluate(composed(workspace, root, tmp_path, *more))
    (row,) = rows_of(tmp_path)
    answers = unpacked(row["correct"], row["n"])
    assert len(answers) == 57 and row["score"] == pytest.approx(100 * sum(answers) / 57)


def test_chat_models_get_the_task_that_takes_code_out_of_the_answer(root, target, workspace):
    target.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    try:
        harness = Harness("humaneval", [root], 0, 1, CodeEval(), chat=True)
        lm = QuantizedLM(target.model, target.tokenizer, 1)
        harness.prepare(lm)
        (task,) = harness.loaded["tasks"].values()
        prompt = task.instances[0].args[0]
    finally:
        target.tokenizer.chat_template = None
    assert harness.task == "humaneval_instruct" and prompt.startswith("<user>Write a solution")
    assert prompt.endswith(("```python\ndef f(x):\n\n", "```python\ndef f(x):\n"))


def test_config_reads_limits_per_benchmark(workspace, root, tmp_path):
    cfg = resolve(composed(workspace, root, tmp_path, "suite.benchmarks.limit={triviaqa: 5}"), EvalConfig)
    assert cfg.suite.benchmarks.limit_of("triviaqa") == 5 and cfg.suite.benchmarks.limit_of("gsm8k") is None
