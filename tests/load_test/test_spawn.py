"""A server that a load test starts for itself."""

import contextlib
import sys

from jaxinfer import cli
from jaxinfer.load_test import spawn
from jaxinfer.load_test.spawn import spawned_server

STUB = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[1:3] == ["--model", "m"], sys.argv
class Handler(http.server.BaseHTTPRequestHandler):
    answers = [503, 503]
    def do_GET(self):
        self.send_response(self.answers.pop() if self.answers else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_spawned_server_is_waited_for_and_stopped(monkeypatch):
    monkeypatch.setattr(spawn, "COMMAND", (sys.executable, "-c", STUB))
    started = []
    popen = spawn.subprocess.Popen
    monkeypatch.setattr(
        spawn.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0]
    )
    with contextlib.suppress(KeyError), spawned_server(["--model", "m"]) as url:
        assert url.startswith("http://127.0.0.1:")
        assert started[0].poll() is None
        raise KeyError("what is measured fails")
    assert started[0].poll() is not None


def test_a_spawned_server_that_ends(capfd):
    flags = ["--num-requests", "1", "--spawn", "--rate", "1", "--", "--max-num-seqs", "0"]
    assert cli.main(["bench", "serve", *flags]) == cli.EXIT_FAILURE
    said = capfd.readouterr().err
    assert "max_num_seqs must be at least 1" in said  # the server's own words
    assert "the server ended with exit code 2 before it was ready" in said
