"""A run directory in a bucket: the run works in a local folder as ever, and a Mirror keeps gs://BUCKET/FOLDER equal.

    open_bucket_dir(url, resume)  # checks the bucket before anything is compiled
    Mirror(url, resume, folder)   # fetches what resume needs; uploads in the background, a checkpoint's marker last

The bucket is the truth: the local folder is emptied at every start.
"""

import base64
import contextlib
import hashlib
import io
import os
import queue
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tpu_utils.base.errors import InputError, PassingError, SaveError
from tpu_utils.base.files import inside
from tpu_utils.base.process import Peers

REQUEST_SECONDS = 60.0  # a request that gets no answer for so long has failed; a chunk must go up in this time
START_SECONDS = 30.0  # how long the checks before a run try again
RETRY_SECONDS = 600.0  # how long a transfer tries again before the run fails
LOG_SECONDS = 60.0  # between two uploads of the log files, when no checkpoint comes first
CHUNK_BYTES = 32 * 2**20  # larger files go up in chunks of this size, each tried again by itself; a multiple of 256 KiB
NOT_UPLOADED = ("checkpoints", "lock")
"""In the run directory: checkpoints go up one by one, a lock file is this machine's own."""


def open_bucket_dir(url: str, resume: str) -> Path:
    """The local working folder of the run at url; a Mirror fills it. Lists, writes, reads and deletes in the bucket
    before it returns: whatever is wrong with it is an InputError here, or a PassingError where nobody answers."""
    folder = working_folder(url)
    with named_errors("run_dir {} cannot be used", url):
        bucket, prefix = connect(url)
        there = list_objects(bucket, prefix, START_SECONDS)
        if resume == "must" and not any(map(is_marker, there)):
            raise InputError(f"{url} holds no complete checkpoint to go on from; check --run_dir")
        if resume == "never" and ("config.json" in there or any(map(is_marker, there))):
            raise InputError(f"run_dir {url} already holds a run; choose another, or continue it with --resume auto")
        try_rights(bucket, f"{prefix}writable")
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def working_folder(url: str) -> Path:
    """Where the run at url works on this machine: one folder for each url."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    readable = re.sub(r"[^\w.-]+", "_", url.removeprefix("gs://"))[-80:]
    return cache / "tpu_runs" / f"{readable}_{hashlib.sha256(url.encode()).hexdigest()[:12]}"


class Mirror:
    """Keeps a bucket directory equal to a local run directory.

    As on disk, a checkpoint counts from its done marker on: that goes up last and is deleted first. Every change names
    the generation it replaces, so a repeated request changes nothing twice and a second process on the same run is
    found out. Use it as a context manager around whatever writes: on leaving it waits until all is in the bucket.

    Making it empties the local folder and fetches the log and the done markers; fetch() gets the rest of a checkpoint.

    Of several processes each has a local folder of its own, on whatever host: it uploads its part of a sharded
    checkpoint with put() and fetches the parts that it needs. The first process does all else, the markers too.
    """

    def __init__(self, url: str, resume: str, folder: Path, peers: Peers | None = None):
        """url, resume: as the options say. folder: what open_bucket_dir gave the first of the processes, peers. Raises
        like open_bucket_dir, on all processes, whichever cannot use the bucket."""
        peers = peers or Peers()
        self._url = url
        self.folder = folder
        self._index = peers.index
        self._sent: dict[str, tuple] = {}  # what the log files looked like when they went up
        self._jobs: queue.Queue = queue.Queue()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if peers.index:
            own = working_folder(self._url)
            self.folder = own.with_name(f"{own.name}_process_{peers.index}")
        peers.from_first(lambda: self._begin(resume))
        peers.on_all(lambda: self._begin("never") if peers.index else None)

    def _begin(self, resume: str) -> None:
        with named_errors("run_dir {} cannot be used", self._url):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._bucket, self._prefix = connect(self._url)
            there = list_objects(self._bucket, self._prefix, START_SECONDS)
            self._generations = {name: blob.generation for name, blob in there.items()}
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in NOT_UPLOADED:
                    path.unlink()
            for name, blob in there.items():
                known = name in ("config.json", "metrics.jsonl", "summary.json") or is_marker(name)
                if known and resume != "never":
                    download(blob, inside(self.folder, name))
            if self._index:
                try_rights(self._bucket, f"{self._prefix}writable_{self._index}")

    def __enter__(self) -> "Mirror":
        if self._index == 0:
            self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
            self._thread.start()
            self._jobs.put(None)  # config.json goes up now: from here on the directory holds a run
        return self

    def __exit__(self, kind, *exception) -> None:
        if not self._thread:
            return
        self._jobs.put("stop")
        self._thread.join()
        if kind is None:
            self.wait()
            self.upload_logs()
        elif not self._failure:  # the run failed for a reason of its own, and that one is raised
            self._upload_logs_if_possible()

    def fetch(self, folder: Path, files: dict[str, int]) -> None:
        """Download these files of a checkpoint folder that are not there yet. Raises PassingError when that fails.
        files: their sizes. An object of another size is left where it is: the checkpoint is damaged."""
        with named_errors("{} cannot be read", self._url):
            there = list_objects(self._bucket, f"{self._prefix}{self._name(folder)}/", RETRY_SECONDS)
            for name, blob in there.items():
                if name in files and blob.size == files[name] and not (path := inside(folder, name)).exists():
                    download(blob, path)

    def send(self, folder: Path, keep: int, best: int | None = None, others: dict[str, int] | None = None) -> None:
        """Upload this complete checkpoint in the background, then delete what is older than the newest `keep` up to it.
        best: a step whose checkpoint is not deleted. others: sizes of its files that other processes have put there.
        Waits for the one before it. Raises SaveError if that one failed."""
        assert self._thread, "outside the with statement nothing is uploaded"
        self.wait()
        self._jobs.put((folder, keep, best, others or {}))

    def unmark(self, folder: Path) -> None:
        """Delete the marker of this folder in the bucket: it is no checkpoint from here on. Raises SaveError."""
        if (marker := f"{self._name(folder)}/done") in self._generations:
            with self._saving(f"the checkpoint {folder.name}"):
                self._delete(marker)

    def put(self, path: Path) -> None:
        """Upload a file of a checkpoint that is not marked, now. Raises SaveError."""
        with self._saving(path.name):
            self._upload(path)

    def send_logs(self) -> None:
        """Upload the log files soon."""
        self._jobs.put(None)

    def wait(self) -> None:
        """Until every checkpoint sent is in the bucket. Raises SaveError; what was complete there still is."""
        self._jobs.join()
        if self._failure:
            raise self._failure

    def upload_logs(self) -> None:
        """Every file outside checkpoints/ that has changed, now. Raises SaveError."""
        with self._saving("its log files"):
            # checkpoints are not even listed: another thread writes and removes them
            tops = [path for path in self.folder.iterdir() if path.name not in NOT_UPLOADED]
            files = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]
            for path in sorted(path for path in files if path.suffix != ".writing"):
                name, found = self._name(path), path.stat()
                state = (found.st_ino, found.st_size, found.st_mtime_ns)
                if self._sent.get(name) != state:
                    self._upload(path)
                    self._sent[name] = state

    def _work(self) -> None:
        """The thread: checkpoints as they come, log files in between."""
        while True:
            try:
                job = self._jobs.get(timeout=LOG_SECONDS)
            except queue.Empty:
                self._jobs.put(None)
                continue
            try:
                if isinstance(job, tuple) and not self._failure:
                    self.upload_logs()  # every line up to the checkpoint's step is there before the checkpoint
                    self._upload_checkpoint(*job)
                elif job is None and not self._failure:
                    self._upload_logs_if_possible()
            except Exception as error:  # whatever it is, wait() raises it in the training loop
                print(f"warning: {error}; the run stops at its next checkpoint", file=sys.stderr, flush=True)
                self._failure = error
            self._jobs.task_done()
            if job == "stop":
                return

    def _upload_logs_if_possible(self) -> None:
        try:
            self.upload_logs()
        except SaveError as error:
            if isinstance(error, AnotherWriter):
                raise
            # they go up again before the next checkpoint, and then a failure ends the run
            print(f"warning: {error}", file=sys.stderr, flush=True)

    def _upload_checkpoint(self, folder: Path, keep: int, best: int | None, others: dict[str, int]) -> None:
        marker = f"{self._name(folder)}/done"
        self.unmark(folder)  # a resumed run comes past it again
        with self._saving(f"the checkpoint {folder.name}"):
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path != folder / "done":
                    self._upload(path)
            there = list_objects(self._bucket, self._prefix, RETRY_SECONDS) if others else {}
            for file, size in others.items():
                found = there[name].size if (name := f"{self._name(folder)}/{file}") in there else "absent"
                if found != size:
                    raise OSError(f"{file} is {found} in the bucket, its process wrote {size} bytes")
            self._upload(folder / "done")
            self._prune(step_of(marker), keep, best)

    def _prune(self, step: int, keep: int, best: int | None) -> None:
        """Delete what is older than the newest `keep` complete checkpoints up to this step, but best, markers first."""
        there = list_objects(self._bucket, self._prefix, RETRY_SECONDS)
        complete = sorted(other for name in there if is_marker(name) and (other := step_of(name)) <= step)
        old = [name for name in there if step_of(name) not in (None, best) and step_of(name) < complete[-keep:][0]]
        for name in sorted(old, key=lambda name: (step_of(name), not is_marker(name))):
            self._generations[name] = there[name].generation
            self._delete(name)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _upload(self, path: Path) -> None:
        """The bytes the file has now: a log file may grow meanwhile."""
        from google.api_core.exceptions import BadRequest, PreconditionFailed
        from google.cloud.storage.exceptions import DataCorruption

        name = self._name(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for attempts_left in (2, 1, 0):
                blob = self._bucket.blob(self._prefix + name, chunk_size=CHUNK_BYTES)
                same = dict(size=size, checksum="crc32c", if_generation_match=self._generations.get(name, 0))
                try:
                    blob.upload_from_file(file, rewind=True, **same, **limits(RETRY_SECONDS))
                    break
                except PreconditionFailed as error:  # stored by a request whose answer was lost, or by someone else
                    blob = self._bucket.get_blob(blob.name, **limits(RETRY_SECONDS))
                    if blob is None or (blob.size, blob.crc32c) != (size, crc32c_of(path, size)):
                        raise AnotherWriter(
                            f"{self._url}/{name} was changed by something else, expected this run alone to write; "
                            "stop the other process, then repeat the command with --resume must"
                        ) from error
                    break
                # other bytes arrived, or a part of a chunk was kept, which this client cannot go on from: once more
                except (BadRequest, DataCorruption, ValueError) as error:
                    if isinstance(error, DataCorruption):  # the client has deleted them
                        self._generations.pop(name, None)
                    if not attempts_left:
                        raise OSError(f"three uploads of {name} broke off: {error}") from error
        self._generations[name] = blob.generation

    def _delete(self, name: str) -> None:
        delete_object(self._bucket, self._prefix + name, self._generations[name], RETRY_SECONDS)
        del self._generations[name]  # only after success: a failed request is repeated

    @contextlib.contextmanager
    def _saving(self, what: str) -> Iterator[None]:
        """Raises as a SaveError what the client raises."""
        try:
            yield
        except storage_errors() as error:
            raise SaveError(
                f"{what} could not be uploaded to {self._url}: {reason(error, self._url)}; "
                "the checkpoints that were complete there still are"
            ) from error


class AnotherWriter(SaveError):
    """The bucket directory is written by a second process."""


def connect(url: str) -> tuple[Any, str]:
    """(bucket, prefix of the object names with its last slash)."""
    from google.cloud import storage  # a second of imports

    name, _, folder = url.removeprefix("gs://").partition("/")
    client = storage.Client(project="unused")  # reading and writing objects needs none
    return client.bucket(name), folder.rstrip("/") + "/"


def try_rights(bucket, name: str) -> None:
    """Write, read and delete an empty object."""
    probe = bucket.blob(name)
    probe.upload_from_string(b"", checksum="crc32c", **limits(START_SECONDS))
    probe.download_as_bytes(**limits(START_SECONDS))
    delete_object(bucket, name, None, START_SECONDS)


def read_object(url: str, name: str, expected: str, max_bytes: int) -> bytes | None:
    """What the object of this name in the directory holds; None without one. Raises InputError like open_bucket_dir."""
    with named_errors("run_dir {} cannot be used", url), tempfile.TemporaryDirectory() as folder:
        bucket, prefix = connect(url)
        blob = bucket.get_blob(prefix + name, **limits(START_SECONDS))
        if blob is None:
            return None
        if blob.size > max_bytes:
            raise InputError(
                f"{url.rstrip('/')}/{name} has {blob.size:,} bytes; expected {max_bytes:,} at most, {expected}"
            )
        download(blob, Path(folder, "object"))
        return Path(folder, "object").read_bytes()


@contextlib.contextmanager
def open_object(url: str, generation: int, block: int) -> Iterator[BinaryIO]:
    """This generation of an object as a file. A read asks the bucket for `block` bytes or more. What the client raises
    then is an InputError or a PassingError when it leaves the with statement, through whichever decoder it came."""
    with named_errors("{} cannot be read as it was when the run began", url, of_files=False):
        bucket, name = url.removeprefix("gs://").split("/", 1)
        blob = connect(f"gs://{bucket}")[0].blob(name, generation=generation)
        opened = blob.open("rb", chunk_size=block, raw_download=True, **limits(RETRY_SECONDS))
        with io.BufferedReader(opened, block) as file:
            yield file


def limits(seconds: float) -> dict[str, Any]:
    """Arguments of one call: the client tries again after what passes by itself (429, 5xx, a broken connection, no
    answer), for so many seconds."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"timeout": min(REQUEST_SECONDS, seconds), "retry": DEFAULT_RETRY.with_timeout(seconds)}


def list_objects(bucket, prefix: str, seconds: float) -> dict[str, Any]:
    """Every object whose name begins so, by the rest of its name."""
    return {blob.name.removeprefix(prefix): blob for blob in bucket.list_blobs(prefix=prefix, **limits(seconds))}


def delete_object(bucket, name: str, generation: int | None, seconds: float) -> None:
    """generation: the only one to delete, or None for whichever is there. It may be gone: an answer can be lost."""
    from google.api_core.exceptions import NotFound

    with contextlib.suppress(NotFound):
        bucket.blob(name).delete(if_generation_match=generation, **limits(seconds))


def download(blob, path: Path) -> None:
    """Raises OSError when other bytes arrive three times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".writing")
    for _ in range(3):
        # checked here: the client checks nothing when it had to continue a broken download
        blob.download_to_filename(str(aside), raw_download=True, checksum=None, **limits(RETRY_SECONDS))
        if (aside.stat().st_size, crc32c_of(aside)) == (blob.size, blob.crc32c):
            aside.replace(path)
            return
    raise OSError(f"{blob.name} arrived three times with other bytes than are stored")


def crc32c_of(path: Path, size: int | None = None) -> str:
    """CRC32C of the first `size` bytes, as Cloud Storage writes it: big-endian, base64."""
    import google_crc32c

    checksum, left = google_crc32c.Checksum(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while block := file.read(min(left, 1 << 22)):
            checksum.update(block)
            left -= len(block)
    return base64.b64encode(checksum.digest()).decode()


def step_of(name: str) -> int | None:
    found = re.match(r"checkpoints/step_([0-9]{8})/", name)
    return int(found[1]) if found else None


def is_marker(name: str) -> bool:
    return re.fullmatch(r"checkpoints/step_[0-9]{8}/done", name) is not None


@contextlib.contextmanager
def named_errors(what: str, url: str, of_files: bool = True) -> Iterator[None]:
    """Raises for storage_errors() an InputError where a retry cannot help (wrong name, missing rights or credentials,
    the local folder), else a PassingError. what: with the url at {}."""
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    try:
        yield
    except storage_errors(of_files) as error:
        lasting = api.NotFound | api.Forbidden | api.Unauthorized | auth.DefaultCredentialsError
        cause = last_cause(error)
        wrong = isinstance(cause, lasting) or (isinstance(cause, OSError) and cause.filename)
        raise (InputError if wrong else PassingError)(f"{what.format(url)}: {reason(error, url)}") from error


def storage_errors(of_files: bool = True) -> tuple[type[Exception], ...]:
    """What the client raises when bucket, credentials or network are to blame; and what the local folder raises."""
    import requests
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    found = (GoogleAPIError, GoogleAuthError, DataCorruption, InvalidResponse, requests.RequestException)
    return (*found, OSError) if of_files else found


def last_cause(error: Exception) -> Exception:
    """The error of the last attempt, out of the client's RetryError."""
    from google.api_core.exceptions import RetryError

    return error.cause or error if isinstance(error, RetryError) else error


def reason(error: Exception, url: str) -> str:
    """What was found and what to do, in one line. Session addresses, which let anyone upload, are left out."""
    import requests
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth
    from google.cloud.storage.exceptions import InvalidResponse

    name = url.split("/")[2]
    cause = last_cause(error)
    if isinstance(cause, InvalidResponse):
        cause = f"status {cause.response.status_code}: {' '.join(cause.response.text.split())}"
    text = re.sub(r"upload_id=[^\s&:'\"]+", "upload_id=...", str(cause) or repr(cause)).strip().splitlines()[0][:300]
    if isinstance(cause, auth.DefaultCredentialsError | auth.RefreshError):
        return f"Google credentials are missing or refused; run gcloud auth application-default login ({text})"
    if isinstance(cause, api.NotFound) and "bucket" in text:
        return f"bucket {name} does not exist; check the name, or gcloud storage buckets create gs://{name} ({text})"
    if isinstance(cause, api.Forbidden | api.Unauthorized):
        return (
            f"these credentials may not list, create, read and delete objects in bucket {name}; see what lacks with "
            f"python setup_tpu.py --bucket gs://{name} ({text})"
        )
    if isinstance(cause, OSError) and cause.filename:  # the local working folder
        return f"{text}; name a folder with room for the checkpoints in XDG_CACHE_HOME"
    if isinstance(cause, auth.TransportError | ConnectionError | requests.RequestException):
        return f"no answer from Cloud Storage; check the network ({text})"
    return text
