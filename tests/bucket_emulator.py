"""A process that speaks the part of Cloud Storage's JSON API that the client library uses for run directories.

gcp-storage-emulator 2026.7.19 ignores ifGenerationMatch, so what makes a repeated upload safe cannot be tested with it
alone. This one keeps preconditions, checksums, pages, sessions and half-received chunks, and a history of changes.

Run: python tests/bucket_emulator.py     prints its port; buckets "runs" and "forbidden" exist
"""

import base64
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

PAGE = 3  # objects in one answer to a listing: several pages in every test
QUANTUM = 1 << 18  # a session keeps whole multiples of this when a chunk is cut short

objects: dict[str, dict] = {}  # name -> its resource, with the content under "data"
sessions: dict[str, dict] = {}
history: list[list] = []  # every change, in order: ["put", name, size] or ["delete", name]
generations = itertools.count(1000)
lock = threading.Lock()


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


class Refused(Exception):
    """(status, message)"""


def check_generation(name: str, query: dict) -> None:
    if "ifGenerationMatch" in query:
        found = objects[name]["generation"] if name in objects else "0"
        if found != query["ifGenerationMatch"]:
            raise Refused(412, f"generation is {found}, asked for {query['ifGenerationMatch']}")


def put(name: str, data: bytes, said: dict, query: dict) -> dict:
    check_generation(name, query)
    if said.get("crc32c") not in (None, crc32c(data)):
        raise Refused(400, f"crc32c is {crc32c(data)}, asked for {said['crc32c']}")
    resource = {"kind": "storage#object", "name": name, "bucket": "runs", "size": str(len(data))}
    resource |= {"generation": str(next(generations)), "metageneration": "1", "crc32c": crc32c(data)}
    objects[name] = {**resource, "data": data}
    history.append(["put", name, len(data)])
    return resource


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms until its headers are acknowledged

    def log_message(self, *arguments) -> None:
        pass

    def answer(self, status: int, body: dict | bytes = b"", headers: dict | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> tuple[bytes, bool]:
        """(what arrived, all of it?)"""
        size = int(self.headers.get("Content-Length") or 0)
        try:
            data = self.rfile.read(size)
        except OSError:
            data = b""
        return data, len(data) == size

    def handle_one(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        data, whole = self.body()
        if not whole:
            self.close_connection = True
            with lock:
                if query.get("upload_id") in sessions:
                    self.chunk(sessions[query["upload_id"]], data[: len(data) // QUANTUM * QUANTUM])
            return
        if url.path == "/history":
            return self.answer(200, {"history": history})
        try:
            with lock:
                self.answer(*self.route(url.path, query, data))
        except Refused as refused:
            self.answer(refused.args[0], {"error": {"code": refused.args[0], "message": refused.args[1]}})

    do_GET = do_POST = do_PUT = do_DELETE = handle_one

    def route(self, path: str, query: dict, data: bytes):
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
            check_generation(name, query)
            del objects[name]
            history.append(["delete", name])
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

    def listing(self, query: dict):
        names = sorted(name for name in objects if name.startswith(query.get("prefix", "")))
        names = [name for name in names if name > query.get("pageToken", "")]
        items = [{key: value for key, value in objects[name].items() if key != "data"} for name in names[:PAGE]]
        return 200, {"items": items, **({"nextPageToken": names[PAGE - 1]} if len(names) > PAGE else {})}

    def start_upload(self, query: dict, data: bytes):
        if query["uploadType"] == "resumable":
            said = json.loads(data)
            check_generation(said["name"], query)  # asked again when the last byte is there
            upload_id = f"secret{next(generations)}"
            sessions[upload_id] = {"said": said, "query": query, "data": b"", "result": None}
            return 200, b"", {"Location": f"http://{self.headers['Host']}{self.path}&upload_id={upload_id}"}
        boundary = b"--" + re.search(r"boundary=\"?([^\";]+)", self.headers["Content-Type"])[1].encode()
        _, meta, content = data.split(boundary, 2)
        said = json.loads(meta.split(b"\r\n\r\n", 1)[1])
        content = content.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n" + boundary + b"--")
        return 200, put(said["name"], content, said, query)

    def chunk(self, session: dict, data: bytes):
        if session["result"] is None:
            first, total = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", self.headers["Content-Range"]).groups()
            kept = len(session["data"])
            if int(first) > kept:
                raise Refused(503, "bytes are missing before this chunk")
            session["data"] += data[kept - int(first) :]  # those it already has are ignored
            if len(session["data"]) < int(total):
                return 308, b"", {"Range": f"bytes=0-{len(session['data']) - 1}"} if session["data"] else {}
            said = session["said"]
            session["result"] = put(said["name"], session["data"], said, session["query"])
        return 200, session["result"]


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # clients and proxies go away in the middle: that is the point
    print(server.server_port, flush=True)
    server.serve_forever()
