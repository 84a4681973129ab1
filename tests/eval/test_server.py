"""Evaluation through a server, against a small one that answers with the test model itself."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from lm_eval.models.huggingface import HFLM

from rolaq.common.errors import RolaqError
from rolaq.eval.__main__ import run as evaluate
from rolaq.eval.harness import Harness
from rolaq.eval.lm import QuantizedLM
from rolaq.eval.sandbox import CodeEval
from rolaq.eval.server_lm import ServerLM
from rolaq.eval.task_config import ServerConfig

from .benchmark_files import make

CONTEXT = 1024


def scores(target, ids):
    """Log-probability of each token after those before it (None of the first), and the best token there."""
    with torch.no_grad():
        table = target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    best = table.max(-1)
    own = [None, *(table[i, token].item() for i, token in enumerate(ids[1:]))]
    return own, [None, *zip(best.values[:-1].tolist(), best.indices[:-1].tolist())]


def continued(target, ids, new, stop):
    """Greedy text, cut before the first stop sequence as a server does."""
    with torch.no_grad():
        found = target.model.generate(
            torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    text = target.tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True)
    return text[: min((text.find(item) for item in stop if item in text), default=len(text))]


class Handler(BaseHTTPRequestHandler):
    """SGLang's `/generate` and, where ``native`` is off, only OpenAI's `/v1/completions`."""

    target, native, broken = None, True, None

    def log_message(self, *args):
        pass

    def reply(self, answer, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self):
        assert self.headers["Authorization"] in (None, "Bearer secret")
        paths = {"/v1/models": {"data": [{"id": "served"}]}}
        if self.native:
            paths["/get_model_info"] = {"model_path": "served"}
        found = paths.get(self.path)
        self.reply(found or {"error": "no such path"}, 200 if found else 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.broken:
            self.reply({"message": self.broken}, 400)
        elif self.path == "/generate":
            self.reply(self.generate(body))
        else:
            self.reply({"choices": [self.complete(body)]})

    def generate(self, body):
        ids, sampling = body["input_ids"], body["sampling_params"]
        assert len(ids) + sampling["max_new_tokens"] <= CONTEXT and sampling["temperature"] == 0
        if not body.get("return_logprob"):
            return {"text": continued(self.target, ids, sampling["max_new_tokens"], sampling["stop"])}
        start = body["logprob_start_len"]
        own, best = scores(self.target, ids)
        tokens = [[None if i == start else own[i], ids[i], None] for i in range(start, len(ids))]
        tops = [None if i == start else [[*best[i], None]] for i in range(start, len(ids))]
        return {"text": "", "meta_info": {"input_token_logprobs": tokens, "input_top_logprobs": tops}}

    def complete(self, body):
        ids = body["prompt"]
        assert body["model"] == "served"
        if not body.get("echo"):
            return {"text": continued(self.target, ids, body["max_tokens"], body["stop"])}
        own, best = scores(self.target, ids)
        tops = [None if item is None else {str(item[1]): item[0]} for item in best]
        return {"logprobs": {"token_logprobs": [*own, -1.0], "top_logprobs": [*tops, {"x": -1.0}]}}


@pytest.fixture
def serve(target):
    """Start a server of a kind; gives its address."""
    servers = []

    def start(**kind):
        handler = type("Own", (Handler,), {"target": target, **kind})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    make(folder)
    return folder


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(HFLM, "max_gen_toks", property(lambda self: 8))
    monkeypatch.setattr(ServerLM, "max_gen_toks", 8)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("name", "shots"), [("mmlu", 1), ("gsm8k", 1), ("triviaqa", 2)])
def test_answers_are_those_of_the_model(serve, target, root, name, shots, native):
    lm = ServerLM(ServerConfig(url=serve(native=native)), target.tokenizer, CONTEXT)
    assert lm.native is native and lm.served == "served"
    harness = Harness(name, [root], shots, 1, CodeEval())
    harness.prepare(lm)
    through = harness.run(lm)
    answers = [r.resps for task in harness.loaded["tasks"].values() for r in task.instances]
    direct = harness.run(QuantizedLM(target.model, target.tokenizer, 1, CONTEXT))
    expected = [r.resps for task in harness.loaded["tasks"].values() for r in task.instances]
    assert (through.score, through.items) == (direct.score, direct.items)
    if name == "mmlu":
        flat = [(value, greedy) for [(value, greedy)] in answers]
        assert [greedy for _, greedy in flat] == [greedy for [(_, greedy)] in expected]
        assert [value for value, _ in flat] == pytest.approx([v for [(v, _)] in expected], abs=1e-4)
    else:
        assert answers == expected


def composed(workspace, root, tmp_path, url, *more):
    GlobalHydra.instance().clear()
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        return compose(
            "eval",
            [
                "suite=paper", "model=auto", f"model.path={workspace}/model", f"model.context={CONTEXT}", "data=local",
                f"data.root={root}", "tracking=none", f"output={tmp_path}", "backend=server", f"server.url={url}",
                "server.budget=4+16", "suite.benchmarks.tasks=[triviaqa]", "suite.benchmarks.shots={triviaqa: 1}", *more,
            ],
        )  # fmt: skip


def test_run_through_a_server_is_labelled_and_resumes(serve, workspace, root, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLAQ_API_KEY", "secret")
    evaluate(composed(workspace, root, tmp_path, serve()))
    path = tmp_path / "model" / "paper.json"
    (row,) = json.loads(path.read_text())["tasks"]
    assert (row["through"], row["reading"], row["method"], row["budget"]) == (
        "server",
        "serving",
        "rolaq",
        "4+16",
    )
    # nothing is asked again but what the server serves
    evaluate(composed(workspace, root, tmp_path, serve(broken="no more")))
    assert json.loads(path.read_text())["tasks"] == [row]
    assert "4+16 serving server" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_retrieval_through_a_server(serve, workspace, root, tmp_path):
    (tmp_path / "essays.jsonl").write_text(json.dumps({"text": "One word follows another. " * 200}))
    more = (
        "suite=ruler", f"suite.ruler.essay=[{tmp_path}/essays.jsonl]", "suite.ruler.tasks=[niah_single_2]",
        "suite.ruler.lengths=[900]", "suite.ruler.samples=2", "suite.ruler.new_tokens=16",
    )  # fmt: skip
    url = serve()
    GlobalHydra.instance().clear()
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        cfg = compose(
            "eval",
            ["model=auto", f"model.path={workspace}/model", f"model.context={CONTEXT}", "data=testbed",
             "tracking=none", f"output={tmp_path}", "backend=server", f"server.url={url}", *more],
        )  # fmt: skip
    evaluate(cfg)
    (row,) = json.loads((tmp_path / "model" / "ruler.json").read_text())["ruler"]
    assert (row["through"], row["n"], row["length"]) == ("server", 2, 900)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ({"broken": "too long"}, (), "/generate answered 400: .*too long"),
        (None, (), "no answer from server.url=http://127.0.0.1:9.*make serve"),
        ({}, ("suite=quick", "suite.ruler=null"), "suite=quick has no part for a server"),
        ({}, ("model.context=null",), "model.context is not set"),
        ({}, ("server.method=rolac",), "Unknown method 'rolac'. Did you mean: rolaq"),
    ],
)
def test_user_errors(serve, workspace, root, tmp_path, kind, more, message):
    url = "http://127.0.0.1:9" if kind is None else serve(**kind)
    keep = [item for item in more if item.startswith("suite=")]
    cfg = composed(workspace, root, tmp_path, url, *[item for item in more if item not in keep])
    if keep:
        GlobalHydra.instance().clear()
        with initialize_config_module("rolaq.conf", version_base="1.3"):
            cfg = compose("eval", ["model=auto", f"model.path={workspace}/model", "tracking=none", "backend=server",
                                   f"server.url={url}", f"output={tmp_path}", *more])  # fmt: skip
    with pytest.raises(RolaqError, match=message):
        evaluate(cfg)
