"""`holdwater serve` as a user meets it: what it refuses, where it says that it listens, how it goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.api.runs import resume
from holdwater.api.serving import prepare_server
from holdwater.cli import call_verb
from holdwater.cli.run_flags import merge_flags
from holdwater.cli.serve import ServerFlags
from holdwater.core.config import RunConfig, ServingConfig
from holdwater.core.errors import BadInput
from holdwater.run.execute import create_run


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), **more}


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ({"listen": "0.0.0.0:0"}, "can be reached from other machines", "`--key-file FILE`"),
        ({"listen": "somewhere"}, "`--listen` must look like `127.0.0.1:8400`", ""),
        ({"key_file": "empty"}, "no key in `empty`", "write one key per line"),
        ({"key_file": "missing"}, "cannot read `missing`", ""),
        ({"tls_cert": "empty"}, "`--tls-cert` and `--tls-key` require each other", ""),
        ({"tls_cert": "empty", "tls_key": "empty"}, "cannot load the certificate and key for TLS", ""),
        ({"queue": 0}, "`--queue` must be at least 1: 0", ""),
        ({"grace": -1.0}, "`--grace` must be at least 0: -1", ""),
        ({"least_workers": 3}, "`--least-workers` must be at most `--workers 2`: 3", ""),
        ({"policy": "policy.py:missing"}, "`policy.py` has no `missing`", ""),
        ({"policy": "policy.py:number"}, "not a policy: `policy.py:number`", "it must be a function"),
        ({"out": "other"}, "the directory contains a run that is not a server: `other`", "another `--out`"),
        ({"out": "served"}, "a server with agent `nop`, not `oracle`", "another `--out`"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_made(place, monkeypatch, said, message, hint):
    monkeypatch.chdir(place)

    with pytest.raises(BadInput) as refused:
        prepare_server("demo", "oracle", said.pop("out", "new"), {"workers": 2}, said)

    assert message in refused.value.message and hint in refused.value.hint
    assert not (place / "new").exists()


def test_flags_that_are_a_runs_alone_are_refused(place):
    with pytest.raises(BadInput, match="unknown option: --only"):
        call_verb("serve", ["demo", "--only", "a*"])
    with pytest.raises(BadInput, match="unknown setting: `lissten`") as refused:
        merge_flags(ServerFlags(), place / "serve.toml")
    assert refused.value.hint == "did you mean `listen`?"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with what is needed to be refused."""
    path = tmp_path_factory.mktemp("serve")
    (path / "empty").write_text("\n")
    (path / "empty").chmod(0o600)
    (path / "policy.py").write_text("number = 7\n")
    (path / "serve.toml").write_text('lissten = "127.0.0.1:0"\n')
    for name, serving in (("other", None), ("served", ServingConfig())):
        config = RunConfig(id=name, suite="demo", agent="nop", created=0.0, version="1", serving=serving)
        create_run(path / name, config)
    return path


def test_resuming_a_server_says_how_that_is_done(place):
    with pytest.raises(BadInput, match="the directory belongs to a server") as refused:
        resume(place / "served")

    assert refused.value.hint.startswith("`holdwater serve demo --agent nop --out ")


def test_a_taken_port_is_exit_2_and_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(tmp_path / "run", f"127.0.0.1:{port}"),
            capture_output=True,
            text=True,
            timeout=stretch(60),
            env=environment(),
            check=False,
        )

    assert (done.returncode, done.stdout) == (2, "")
    assert f"cannot listen on `127.0.0.1:{port}`: " in done.stderr


def test_it_prints_its_address_continues_after_a_kill_and_drains_on_signal(tmp_path):
    words = ["--json", "--quiet"]
    keys = {"HOLDWATER_SERVE_KEYS": "first, second"}
    with served(tmp_path / "run", *words, **keys) as server:
        result = server.order("one")
        assert (result["rollouts"][0]["outcome"], result.get("new", True)) == ("passed", True)
        with pytest.raises(urllib.error.HTTPError, match="409"):
            server.order("one", key="first")  # the order is another client's
        server.order("two")  # the ledger has by then that the first was delivered
        server.process.kill()
    with served(tmp_path / "run", *words, **keys) as server:
        again = server.order("one")
        assert again["rollouts"][0]["attempt"] == result["rollouts"][0]["attempt"]
        assert again["new"] is False
        assert server.order("three")["order"] == result["order"] + 2
        server.process.send_signal(signal.SIGTERM)
        out, _ = server.process.communicate(timeout=stretch(60))

    summary = json.loads(out)
    assert (server.process.returncode, summary["state"]) == (3, "interrupted")
    assert (summary["planned"], summary["settled"]) == (3, 3)


def command(out: Path, listen: str) -> list[str]:
    model = ["--agent", "oracle", "--model", "scripted", "--workers", "1"]
    program = [sys.executable, "-m", "holdwater", "serve", "demo", *model]
    return [*program, "--listen", listen, "--out", str(out)]


class Server:
    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def order(self, name: str, key: str = "second") -> dict:
        body = json.dumps({"key": name, "instance": "backup-names", "trajectory": "none"}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/v1/orders", body, headers)
        with urllib.request.urlopen(request, timeout=stretch(60)) as response:
            return json.load(response)


@contextmanager
def served(out: Path, *words: str, **variables: str) -> Iterator[Server]:
    """A server that says that it is ready; whatever is left of it in the end is killed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    line = [*command(out, "127.0.0.1:0"), *words]
    process = subprocess.Popen(line, text=True, env=environment(**variables), **pipes)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("serving: http://127.0.0.1:"), said
        yield Server(process, said.split()[1])
    finally:
        process.kill()
        process.communicate()
