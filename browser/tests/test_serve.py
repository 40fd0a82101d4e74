"""The page's server without a browser: what it gives to whom."""

import http.client
import os
import socket
import sys

import pytest
from chromium import isolated_server
from processes import run

from browser import serve


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "web" / "models"
    (folder / "good").mkdir(parents=True)
    (folder / "good" / "model.json").write_text("{}")
    return folder


@pytest.fixture
def address(models):
    with isolated_server(models) as found:
        yield found


def ask(address: str, path: str, host: str = "localhost:1") -> http.client.HTTPResponse:
    asked = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=20)
    asked.request("GET", path, headers={"Host": host})
    return asked.getresponse()


def status(address: str, path: str) -> int:
    return ask(address, path).status


def test_this_machine_alone_gets_the_page_with_its_policy(address):
    answer = ask(address, "/", "127.0.0.1:1")
    assert answer.status == 200 and answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert ask(address, "/models/good/model.json").read() == b"{}"
    assert ask(address, "/", "evil.example:80").status == 403


def test_only_regular_files_that_lie_below_the_models(address, models, tmp_path):
    """/models/etc/passwd was served where a folder of models had a link named etc; a FIFO was waited for."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("key")
    (models.parent / "secret").write_text("key")
    (models / "linked").symlink_to(tmp_path / "elsewhere")
    (models / "good" / "secret").symlink_to(tmp_path / "elsewhere" / "secret")
    (models / "good" / "same").symlink_to("model.json")
    os.mkfifo(models / "good" / "fifo")
    for path in ("/models/good/model.json", "/models/good/same", "/chat_templates/chatml.jinja"):
        assert status(address, path) == 200, path
    for name in ("linked/secret", "good/secret", "good/fifo", "good", "good/", "good/..", "", "none/model.json"):
        assert status(address, f"/models/{name}") == 404, name
    for path in ("/models/../secret", "/models/%2e%2e/secret", "/chat_templates/../chat.py", "/chat_templates/"):
        assert status(address, path) == 404, path
    for path in ("/../README.md", "/%2e%2e/README.md", "/node_modules/", "//etc/passwd"):
        assert status(address, path) == 404, path


def test_other_writings_of_the_path_of_a_model(address, models, monkeypatch):
    """The page's own folder has the models by default: /%6dodels/NAME/FILE was served without a look at it."""
    monkeypatch.setattr(serve, "WEB", models.parent)
    (models.parent / "index.html").write_text("page")
    (models.parent / "outside").symlink_to("/etc/passwd")
    (models / "good" / "secret").symlink_to("/etc/passwd")
    os.mkfifo(models / "good" / "fifo")
    assert [status(address, path) for path in ("/", "/index.html?x", "/models/good/model.json")] == [200] * 3
    for start in ("/models", "/%6dodels", "/./models", "/x/../models", "/models/.", "/models%2f", "//models"):
        for name in ("secret", "fifo", "%66ifo"):
            assert status(address, f"{start}/good/{name}") == 404, start
    assert status(address, "/outside") == 404


@pytest.mark.parametrize(
    "options, said",
    [
        (["--port", "99999"], "port 99999 cannot be used"),
        ([], "run npm ci --ignore-scripts --prefix"),
    ],
)
def test_what_cannot_be_served_is_one_message(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.setattr(serve, "WEB", tmp_path)
    if options:
        (tmp_path / "node_modules").mkdir()
    monkeypatch.setattr(sys, "argv", ["serve", *options])
    assert serve.main() == 2
    told = capsys.readouterr()
    assert said in told.err and len(told.err.splitlines()) == 1 and not told.out


def test_it_is_started_as_a_module():
    done = run("browser.serve", "--models", "exportd", cold=True)
    assert done.returncode == 2 and "--models exportd: no such folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_sends_nothing_is_not_waited_for(address, monkeypatch):
    assert serve.Handler.timeout == 60
    monkeypatch.setattr(serve.Handler, "timeout", 0.2)
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as asked:
        asked.sendall(b"GET / HT")
        assert asked.recv(100) == b""
