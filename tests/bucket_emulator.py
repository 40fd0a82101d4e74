"""A server that speaks the part of Cloud Storage's JSON API that the client library uses for run directories, and
fails, where a test asks it to, the way networks and services do.

gcp-storage-emulator 2026.7.19 ignores ifGenerationMatch, so what makes a repeated upload safe cannot be tested with it
alone. This one keeps preconditions, checksums, pages, sessions and half-received chunks, and a history of changes.

Run: python tests/bucket_emulator.py     prints its port; buckets "runs" and "forbidden" exist
"""

import base64
import contextlib
import itertools
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

PAGE = 3  # objects in one answer to a listing: several pages in every test
QUANTUM = 1 << 18  # a session keeps whole multiples of this when a chunk is cut short
FAULTS = ("503", "reset", "lost", "truncate", "stall")
"""503: refused. reset: cut in mid-request, half of it arrived. lost: done, the answer is dropped. truncate: cut in
mid-answer. stall: done, the answer comes after the client gave up.
Beside these, alter: a bit of the request's body is another, or of an answer that is then cut in the middle."""


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class Refused(Exception):
    """(status, message)"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms until its headers are acknowledged

    def log_message(self, *arguments) -> None:
        pass

    def handle_one(self) -> None:
        with contextlib.suppress(OSError):  # clients go away in the middle: that is the point
            self.serve()

    do_GET = do_POST = do_PUT = do_DELETE = handle_one

    def serve(self) -> None:
        bucket, url = self.server, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        size = int(self.headers.get("Content-Length") or 0)
        if fault := bucket.plan(self.command, self.path):
            bucket.injected.append(fault)
        data = self.rfile.read(size // 2 if fault == "reset" else size)
        if fault == "reset" or len(data) < size:
            with bucket.lock:
                if query.get("upload_id") in bucket.sessions:
                    self.chunk(bucket.sessions[query["upload_id"]], data[: len(data) // QUANTUM * QUANTUM])
            return self.cut()
        if fault == "503":
            return self.answer(503, {"error": {"code": 503, "message": "Backend Error"}})
        if fault == "alter" and data:
            data = flipped(data, size // 2)
        try:
            with bucket.lock:
                status, *body = self.route(url.path, query, data)
        except Refused as refused:
            status, body = refused.args[0], [{"error": {"code": refused.args[0], "message": refused.args[1]}}]
        if fault == "lost":
            return self.cut()
        if fault == "stall":
            time.sleep(bucket.stall_seconds)
        if fault == "alter" and not data:
            body[0], fault = flipped(body[0], 0), "truncate"
        self.answer(status, *body, half=fault == "truncate")

    def cut(self) -> None:
        """The connection goes away with a reset, not an orderly end."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()

    def answer(self, status: int, body: dict | bytes = b"", headers: dict | None = None, half: bool = False) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if half else content)
        if half:
            self.cut()

    def route(self, path: str, query: dict, data: bytes):
        """(status, body, headers) of an answer; the last two may be absent."""
        objects, sessions = self.server.objects, self.server.sessions
        found = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", path)
        if not found:
            raise Refused(501, f"not part of this emulator: {self.command} {path}")
        bucket, name = found[2], unquote(found[3] or "")
        if bucket == "forbidden":
            raise Refused(403, "someone does not have storage.objects.list access to the Google Cloud Storage bucket.")
        if bucket != "runs":
            raise Refused(404, "The specified bucket does not exist.")
        if "upload_id" in query:
            if query["upload_id"] not in sessions:
                raise Refused(404, "no such upload")
            return self.chunk(sessions[query["upload_id"]], data)
        if self.command == "POST":
            return self.start_upload(query, data)
        if not name:
            return self.listing(query)
        if name not in objects or query.get("generation") not in (None, objects[name]["generation"]):
            raise Refused(404, f"No such object: {bucket}/{name}")
        if self.command == "DELETE":
            self.check_generation(name, query)
            del objects[name]
            self.server.history.append(["delete", name])
            return (204,)
        resource = {key: value for key, value in objects[name].items() if key != "data"}
        if query.get("alt") != "media":
            return 200, resource
        content = objects[name]["data"]
        headers = {"X-Goog-Hash": f"crc32c={resource['crc32c']}", "X-Goog-Generation": resource["generation"]}
        headers["X-Goog-Stored-Content-Length"] = resource["size"]
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first = int(wanted[1])
            if content and first >= len(content):
                raise Refused(416, "range not satisfiable")
            last = min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return 206, content[first : last + 1], headers
        return 200, content, headers

    def check_generation(self, name: str, query: dict) -> None:
        if "ifGenerationMatch" in query:
            found = self.server.objects[name]["generation"] if name in self.server.objects else "0"
            if found != query["ifGenerationMatch"]:
                raise Refused(412, f"generation is {found}, asked for {query['ifGenerationMatch']}")

    def put(self, data: bytes, said: dict, query: dict) -> dict:
        name = said["name"]
        self.check_generation(name, query)
        if said.get("crc32c") not in (None, crc32c(data)):
            raise Refused(400, f"crc32c is {crc32c(data)}, asked for {said['crc32c']}")
        resource = {"kind": "storage#object", "name": name, "bucket": "runs", "size": str(len(data))}
        resource |= {"generation": self.server.new_name(), "metageneration": "1", "crc32c": crc32c(data)}
        self.server.objects[name] = {**resource, "data": data}
        self.server.history.append(["put", name, len(data)])
        return resource

    def listing(self, query: dict):
        objects = self.server.objects
        names = sorted(name for name in objects if name.startswith(query.get("prefix", "")))
        names = [name for name in names if name > query.get("pageToken", "")]
        items = [{key: value for key, value in objects[name].items() if key != "data"} for name in names[:PAGE]]
        return 200, {"items": items, **({"nextPageToken": names[PAGE - 1]} if len(names) > PAGE else {})}

    def start_upload(self, query: dict, data: bytes):
        if query["uploadType"] == "resumable":
            said = json.loads(data)
            self.check_generation(said["name"], query)  # asked again when the last byte is there
            upload_id = f"secret{self.server.new_name()}"
            self.server.sessions[upload_id] = {"said": said, "query": query, "data": b"", "result": None}
            return 200, b"", {"Location": f"http://{self.headers['Host']}{self.path}&upload_id={upload_id}"}
        boundary = b"--" + re.search(r"boundary=\"?([^\";]+)", self.headers["Content-Type"])[1].encode()
        _, meta, content = data.split(boundary, 2)
        said = json.loads(meta.split(b"\r\n\r\n", 1)[1])
        content = content.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n" + boundary + b"--")
        return 200, self.put(content, said, query)

    def chunk(self, session: dict, data: bytes):
        if session["result"] is None:
            first, total = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", self.headers["Content-Range"]).groups()
            kept = len(session["data"])
            if int(first) > kept:
                raise Refused(503, "bytes are missing before this chunk")
            session["data"] += data[kept - int(first) :]  # those it already has are ignored
            if len(session["data"]) < int(total):
                return 308, b"", {"Range": f"bytes=0-{len(session['data']) - 1}"} if session["data"] else {}
            session["result"] = self.put(session["data"], session["said"], session["query"])
        return 200, session["result"]


class BucketEmulator(ThreadingHTTPServer):
    """Listens on .url. plan(method, path) names the fault of a request, or None; it may also block."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.objects: dict[str, dict] = {}  # name -> its resource, with the content under "data"
        self.sessions: dict[str, dict] = {}
        self.history: list[list] = []  # every change, in order: ["put", name, size] or ["delete", name]
        self.plan: Callable[[str, str], str | None] = lambda method, path: None
        self.injected: list[str] = []
        self.stall_seconds = 1.0
        self.lock, self._numbers = threading.Lock(), itertools.count(1000)

    def new_name(self) -> str:
        return str(next(self._numbers))

    def handle_error(self, request, address) -> None:
        pass


if __name__ == "__main__":
    server = BucketEmulator()
    print(server.server_port, flush=True)
    server.serve_forever()
