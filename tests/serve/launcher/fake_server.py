"""Stands in for SGLang's server: the same paths, in a fraction of a second, without a GPU.

The environment's FAKE_SERVER is JSON: `states` (the `rolaq` blocks), `mode`, `pids` (a file for process ids).
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SETUP = json.loads(os.environ["FAKE_SERVER"])
MODE = SETUP.get("mode", "good")


def argument(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


def api_key():
    if argument("--config") is None:
        return None
    with open(argument("--config"), encoding="utf-8") as file:
        assert (
            os.stat(file.fileno()).st_mode & 0o077 == 0
            or os.stat(os.path.dirname(file.name)).st_mode & 0o077 == 0
        )
        return json.load(file)["api-key"]


KEY = api_key()


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self):
        return KEY is None or MODE == "open" or self.headers.get("Authorization") == f"Bearer {KEY}"

    def do_GET(self):
        if self.path == "/health":
            self.answer(503 if MODE == "slow" else 200, {})
        elif not self.allowed():
            self.answer(401, {"error": "Unauthorized"})
        else:
            states = [{"rolaq": block, "memory_usage": {"token_capacity": 640}} for block in SETUP["states"]]
            self.answer(200, {"internal_states": states})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        made = 0 if MODE == "mute" else body["sampling_params"]["max_new_tokens"]
        self.answer(200, {"text": "x", "meta_info": {"completion_tokens": made}})

    def log_message(self, *arguments):
        pass


def main():
    print(f"server_args=ServerArgs(api_key={KEY!r})")
    print("Load weight begin. avail mem=1 GB", flush=True)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if "pids" in SETUP:
        with open(SETUP["pids"], "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {helper.pid}")
    if MODE == "refused":
        print(
            "Traceback (most recent call last):\nrolaq.common.errors.RolaqError: --kv-cache-dtype fp8_e4m3: no"
        )
        sys.exit(1)
    if MODE == "unloaded":
        print("Failed to execute general plugin: rolaq\nTraceback …\nTypeError: no such thing\nusage: …")
        print(
            "sglang serve: error: argument --attention-backend: invalid choice: 'rolaq' (choose from 'triton')"
        )
        sys.exit(2)
    if MODE == "crash":
        print("RuntimeError: out of memory\nbye", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = ThreadingHTTPServer((argument("--host"), int(argument("--port"))), Handler)
    if MODE == "short":  # the process ends a while after it was up
        import threading

        threading.Thread(target=lambda: (time.sleep(1.5), print("ValueError: late"), os._exit(3))).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
