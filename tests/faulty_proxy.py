"""An HTTP proxy in front of a bucket emulator that fails the way networks and services do."""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("503", "reset", "lost", "truncate", "stall")
"""503: refused, not passed on. reset: cut in mid-request, half of it passed on. lost: passed on, the answer is dropped.
truncate: cut in mid-answer. stall: passed on, the answer comes after the client gave up.
Beside these, alter: a bit of the request's body is another, or of an answer that is then cut in the middle."""


class FaultyProxy:
    """Listens on .url. plan(method, path) names the fault of a request, or None; it may also block."""

    def __init__(self, upstream_port: int, stall_seconds: float):
        self.plan: Callable[[str, str], str | None] = lambda method, path: None
        self.upstream_port = upstream_port
        self.injected: list[str] = []
        self.requests: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # as in bucket_emulator.py

            def log_message(self, *arguments) -> None:
                pass

            def cut(self) -> None:
                """The connection goes away with a reset, not an orderly end."""
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.wfile.flush()
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.shutdown(socket.SHUT_RD)
                    self.connection.close()

            def relay(self) -> None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self.pass_on()

            def pass_on(self) -> None:
                proxy.requests.append((self.command, self.path))
                fault = proxy.plan(self.command, self.path)
                if fault:
                    proxy.injected.append(fault)
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size // 2 if fault == "reset" else size)
                if fault == "alter":
                    body = body[: size // 2] + bytes(b ^ 1 for b in body[size // 2 :][:1]) + body[size // 2 + 1 :]
                if fault == "503":
                    return self.answer(503, [], b'{"error": {"code": 503, "message": "Backend Error"}}')
                upstream = http.client.HTTPConnection("127.0.0.1", upstream_port)
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for key, value in self.headers.items():
                    upstream.putheader(key, value)
                upstream.endheaders(body)
                if fault == "reset":
                    upstream.close()
                    return self.cut()
                response = upstream.getresponse()
                content = response.read()
                upstream.close()
                if fault == "lost":
                    return self.cut()
                if fault == "stall":
                    time.sleep(stall_seconds)
                if fault == "alter" and not body:
                    content = bytes([content[0] ^ 1]) + content[1:]
                cut = fault == "truncate" or (fault == "alter" and not body)
                self.answer(response.status, response.getheaders(), content, cut)

            def answer(self, status: int, headers: list, content: bytes, cut: bool = False) -> None:
                self.send_response(status)
                for key, value in headers:
                    if key.lower() not in ("content-length", "connection", "date", "server"):
                        self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.cut()

            do_GET = do_POST = do_PUT = do_DELETE = relay

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda request, address: None  # clients go away in the middle: that is the point
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
