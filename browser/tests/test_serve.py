"""The page's server without a browser: what it gives to whom."""

import http.client
import os
import socket
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
    for name in ("linked/secret", "good/secret", "good/fifo", "good", "good/..", "none/model.json"):
        assert status(server, f"/models/{name}") == 404, name


def test_who_sends_nothing_is_not_waited_for(server, monkeypatch):
    assert serve.Handler.timeout == 60
    monkeypatch.setattr(serve.Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as asked:
        asked.sendall(b"GET / HT")
        assert asked.recv(100) == b""
