"""The page's server without a browser: what it gives to whom."""

import http.client
import os
import socket
import sys

import pytest
from chromium import isolated_server

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


def test_only_regular_files_that_lie_below_the_models(address, models, tmp_path, monkeypatch):
    """/models/etc/passwd was served where a folder of models had a link named etc; a FIFO was waited for. The page's
    own folder has the models by default: /%6dodels/NAME/FILE was served without a look at it."""
    web, elsewhere = models.parent, tmp_path / "elsewhere"
    monkeypatch.setattr(serve, "WEB", web)
    elsewhere.mkdir()
    for path in (web / "index.html", elsewhere / "secret"):
        path.write_text("text")
    (web / "chat_templates").symlink_to(serve.TEMPLATES)
    (web / "outside").symlink_to("/etc/passwd")
    (models / "linked").symlink_to(elsewhere)
    (models / "good" / "secret").symlink_to(elsewhere / "secret")
    (models / "good" / "same").symlink_to("model.json")
    os.mkfifo(models / "good" / "fifo")
    served = ["/", "/index.html?x", "/models/good/model.json", "/models/good/same", "/chat_templates/chatml.jinja"]
    refused = ["/outside", "/chat_templates/../chat.py", "/chat_templates/", "/../README.md", "/%2e%2e/README.md"]
    refused += ["//etc/passwd", "/models/linked/secret", "/models/good", "/models/good/", "/models/good/..", "/models/"]
    others = ("/%6dodels", "/./models", "/x/../models", "/models/.", "/models%2f")
    refused += [f"{start}/good/model.json" for start in (*others, "/models/../models")]
    for start in ("/models", "//models", *others):
        refused += [f"{start}/good/{name}" for name in ("secret", "fifo", "%66ifo")]
    assert [path for path in served if status(address, path) != 200] == []
    assert [path for path in refused if status(address, path) != 404] == []


@pytest.mark.parametrize(
    "options, said",
    [
        (["--port", "99999"], "port 99999 cannot be used"),
        (["--models", "exportd"], "--models exportd: no such folder"),
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


def test_who_sends_nothing_is_not_waited_for(address, monkeypatch):
    assert serve.Handler.timeout == 60
    monkeypatch.setattr(serve.Handler, "timeout", 0.2)
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as asked:
        asked.sendall(b"GET / HT")
        assert asked.recv(100) == b""
