"""A pretended metadata server of a TPU VM: the header it wants and gives, ETag, waiting for a change."""

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator

INSTANCE = "/computeMetadata/v1/instance/"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        path, _, query = self.path.partition("?")
        key = path.removeprefix(INSTANCE).removeprefix("attributes/")
        options = dict(pair.split("=") for pair in query.split("&")) if query else {}
        server.asked.append((key, options))
        time.sleep(server.delay)
        if self.headers.get("Metadata-Flavor") != "Google" or key not in server.pages:
            return self.answer(403 if key in server.pages else 404, "")
        with server.changed:
            if options.get("wait_for_change") == "true":
                known = options["last_etag"]
                server.changed.wait_for(lambda: etag(server.pages[key]) != known, float(options["timeout_sec"]))
            text = server.pages[key]
        self.answer(server.code, text)

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Metadata-Flavor", self.server.flavor)
        self.send_header("ETag", etag(text))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class MetadataServer(http.server.ThreadingHTTPServer):
    """A test sets pages {name: text}, code, flavor and delay (seconds) of each answer; asked: (name, options)."""

    daemon_threads = True

    def __init__(self, pages: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.pages, self.code, self.flavor, self.delay, self.asked = dict(pages), 200, "Google", 0.0, []
        self.changed = threading.Condition()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def set(self, key: str, text: str) -> None:
        with self.changed:
            self.pages[key] = text
            self.changed.notify_all()


def etag(text: str) -> str:
    return f"{sum(text.encode()):016x}"


@contextlib.contextmanager
def metadata_server(**pages: str) -> Iterator[MetadataServer]:
    """pages: with _ for - in their names."""
    with MetadataServer({name.replace("_", "-"): text for name, text in pages.items()}) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
