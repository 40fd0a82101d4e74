"""Serve this folder's page on this machine alone, isolated, so that WebAssembly may use several threads.

Run:     python -m browser.serve
             http://127.0.0.1:8000
         python -m browser.serve --models exported
             exported/NAME is loaded by http://127.0.0.1:8000/?model=models/NAME

Standard library alone. `python -m http.server --bind 127.0.0.1 --directory browser/page` serves the same page, with
one thread.
"""

import argparse
import re
import sys
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WEB = Path(__file__).resolve().parent / "page"
TEMPLATES = WEB.parent.parent / "language" / "data" / "chat_templates"  # a link in the page leads there
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; connect-src 'self'; "
    "worker-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",  # these two isolate the page: then it may share memory with threads
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": POLICY,  # for the worker too: the policy in index.html does not apply to it
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MODEL_FILE = re.compile(r"/models/([A-Za-z0-9][A-Za-z0-9._-]{0,99})/([A-Za-z0-9][A-Za-z0-9._-]{0,99})")


class Handler(SimpleHTTPRequestHandler):
    """The files of this folder, and below /models/ those of folders in `models`: regular files that lie there.

    A link that leads out of it would show any file of this machine to the page; a FIFO holds its thread for ever.
    """

    timeout = 60  # seconds for the other side to send a request, or to take a part of the answer
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".js": "text/javascript"}

    def __init__(self, *args, models: Path, **kwargs):
        self.models = models
        super().__init__(*args, directory=str(WEB), **kwargs)

    def translate_path(self, path: str) -> str:
        match = MODEL_FILE.fullmatch(path.partition("?")[0])
        roots = (self.models,) if match else (WEB, TEMPLATES)
        file = self.models.joinpath(*match.groups()) if match else Path(super().translate_path(path))
        # /models/ in another writing (/%6dodels/, /./models/) gives nothing: its names were not looked at
        looked_at = match or not file.is_relative_to(WEB / "models")
        inside = any(file.resolve().is_relative_to(root.resolve()) for root in roots)
        return str(file if looked_at and inside and (file.is_file() or file == WEB) else WEB / "no such file")

    def send_head(self):
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost"):  # DNS rebinding: another site could read the models
            self.send_error(403, "open this page by http://127.0.0.1")
            return None
        return super().send_head()

    def copyfile(self, source, outputfile):
        with suppress(ConnectionError, TimeoutError):  # the reader cancelled, or takes no more
            super().copyfile(source, outputfile)

    def list_directory(self, path):
        self.send_error(404)

    def end_headers(self):
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *args):
        """Nothing: the browser shows what failed."""


def make_server(models: Path, port: int) -> ThreadingHTTPServer:
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, models=models))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m browser.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    parser.add_argument(
        "--models", default=str(WEB / "models"), help="folder of exported folders (default browser/page/models)"
    )
    arguments = parser.parse_args()
    if not Path(arguments.models).is_dir() and arguments.models != parser.get_default("models"):
        print(f"--models {arguments.models}: no such folder; expected one that holds exported folders", file=sys.stderr)
        return 2
    if not (WEB / "node_modules").is_dir():
        install = f"npm ci --ignore-scripts --prefix {WEB}"
        print(f"onnxruntime-web is not beside the page: no {WEB / 'node_modules'}; run {install}", file=sys.stderr)
        return 2
    try:
        server = make_server(Path(arguments.models), arguments.port)
    except (OSError, OverflowError) as error:
        print(f"port {arguments.port} cannot be used: {error}; choose another with --port", file=sys.stderr)
        return 2
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
