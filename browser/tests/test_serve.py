"""The page's server without a browser: what it gives to whom."""

import http.client
import os
import socket
import sys
import threading

import pytest

from browser import serve


@pytest.fixture
def server(tmp_path):
    models = tmp_path / "models"
    (models / "good").mkdir(parents=True)
    (models / "good" / "model.json").write_text("{}")
    made = serve.make_server(models, 0)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def status(server, path: str) -> int:
    asked = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    asked.request("GET", path, headers={"Host": f"localhost:{server.server_port}"})
    return asked.getresponse().status


def test_only_regular_files_that_lie_below_the_models(server, tmp_path):
    """/models/etc/passwd was served where a folder of models had a link named etc; a FIFO was waited for."""
    models = tmp_path / "models"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("key")
    (models / "linked").symlink_to(tmp_path / "elsewhere")
    (models / "good" / "secret").symlink_to(tmp_path / "elsewhere" / "secret")
    (models / "good" / "same").symlink_to("model.json")
    os.mkfifo(models / "good" / "fifo")
    assert [status(server, f"/models/good/{name}") for name in ("model.json", "same")] == [200, 200]
    assert status(server, "/chat_templates/chatml.jinja") == 200, "a link of the page's own"
    assert status(server, "/chat_templates/../chat.py") == status(server, "/chat_templates/") == 404
    for name in ("linked/secret", "good/secret", "good/fifo", "good", "good/..", "none/model.json"):
        assert status(server, f"/models/{name}") == 404, name


def test_other_writings_of_the_path_of_a_model(tmp_path, monkeypatch):
    """The page's own folder has the models by default: /%6dodels/NAME/FILE was served without a look at it."""
    monkeypatch.setattr(serve, "WEB", tmp_path)
    (tmp_path / "models" / "good").mkdir(parents=True)
    (tmp_path / "index.html").write_text("page")
    (tmp_path / "models" / "good" / "model.json").write_text("{}")
    (tmp_path / "models" / "good" / "secret").symlink_to("/etc/passwd")
    (tmp_path / "outside").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "models" / "good" / "fifo")
    made = serve.make_server(tmp_path / "models", 0)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        assert [status(made, path) for path in ("/", "/index.html?x", "/models/good/model.json")] == [200] * 3
        for start in ("/models", "/%6dodels", "/./models", "/x/../models", "/models/.", "/models%2f", "//models"):
            for name in ("secret", "fifo", "%66ifo"):
                assert status(made, f"{start}/good/{name}") == 404, start
        assert status(made, "/outside") == 404
    finally:
        made.shutdown()
        made.server_close()


def test_a_page_without_its_packages_is_not_served(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "WEB", tmp_path)
    monkeypatch.setattr(sys, "argv", ["serve", "--models", str(tmp_path)])
    assert serve.main() == 2
    said = capsys.readouterr()
    assert f"run npm ci --ignore-scripts --prefix {tmp_path}" in said.err and not said.out


def test_who_sends_nothing_is_not_waited_for(server, monkeypatch):
    assert serve.Handler.timeout == 60
    monkeypatch.setattr(serve.Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as asked:
        asked.sendall(b"GET / HT")
        assert asked.recv(100) == b""
