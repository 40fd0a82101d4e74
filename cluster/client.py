"""Talks to the head of a shared cluster, by HTTP alone: Ray's Jobs API, its State API, and the file of the queue."""

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import secrets
import shlex
import socket
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.deciding import Host, Request, candidates
from cluster.driver import SECRETS_MODULE, Spec
from cluster.folder import check_folder, digest_of
from cluster.turns import STATE_FILE, chips_wanted, host_of
from tpu_utils.base.errors import InputError, PassingError, first_line

REACH_SECONDS = 5.0
START_SECONDS = 120.0
"""How long submit() tries again while the head is still starting."""
PROBE_SECONDS = 600.0
"""How long the job may take that asks each host, on a head that may be busy."""
STOP_SECONDS = 600
"""How long a script may take to save and end after `stop`; then Ray kills it."""
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
HERE = Path(__file__).resolve().parent
PROBE = HERE / "probe.py"


class Cluster:
    """A shared cluster at http://HEAD:8265. Raises InputError where nobody answers there, or not the right version."""

    def __init__(self, address: str):
        self.address = address if "://" in address else f"http://{address}"
        try:
            parts = urllib.parse.urlsplit(self.address)
            port = parts.port or (443 if parts.scheme == "https" else 8265)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("expected http://")
        except ValueError as error:
            raise InputError(
                f"address {address!r} is not understood; expected the head's dashboard, http://HEAD:8265"
            ) from error
        self.address = f"{parts.scheme}://{parts.netloc if parts.port else f'{parts.netloc}:{port}'}"
        try:
            socket.create_connection((parts.hostname, port), REACH_SECONDS).close()
        except OSError as error:
            raise InputError(
                f"nobody answers at {self.address} ({error}); expected the dashboard of a running head; check "
                "--address or RAY_ADDRESS, and that the head was started with --dashboard-host=0.0.0.0"
            ) from error
        import ray
        from ray.job_submission import JobSubmissionClient

        logging.disable(logging.WARNING)  # Ray's own talk of packages and sockets
        try:
            self.jobs = JobSubmissionClient(self.address)
            there = self.jobs._do_request("GET", "/api/version")
            found = there.json().get("ray_version") if there.status_code == 200 else f"code {there.status_code}"
        except ray.exceptions.AuthenticationError as error:
            raise InputError(
                f"the cluster at {self.address} refuses this token, or wants one: set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or ~/.ray/auth_token to the cluster's own"
            ) from error
        except (RuntimeError, ConnectionError, ValueError, OSError) as error:
            raise InputError(
                f"{self.address} is no dashboard of Ray: {first_line(error)}; expected http://HEAD:8265"
            ) from error
        if found != ray.__version__:
            raise InputError(
                f"the cluster at {self.address} has Ray {found}, expected {ray.__version__} as here; install the same "
                "cluster/requirements.txt on both"
            )

    def nodes(self) -> list[dict]:
        """As the State API has them, with the keys of ray.nodes()."""
        from ray.util.state import list_nodes

        found = []
        for node in list_nodes(address=self.address, detail=True, limit=10_000, raise_on_missing_output=False):
            named = {"NodeID": node.node_id, "Alive": node.state == "ALIVE", "Labels": node.labels}
            named |= {"Resources": node.resources_total or {}, "NodeManagerAddress": node.node_ip}
            found.append(named | {"head": node.is_head_node})
        return found

    def hosts(self) -> list[Host]:
        return [host for node in self.nodes() if (host := host_of(node))]

    def state(self) -> dict:
        """What the queue wrote last; empty where no run was ever submitted."""
        head = next((node["NodeID"] for node in self.nodes() if node["head"] and node["Alive"]), None)
        if head is None:
            raise PassingError(f"the cluster at {self.address} has no live head; try again")
        query = urllib.parse.urlencode({"node_id": head, "filename": STATE_FILE, "lines": 10})
        answer = self.jobs._do_request("GET", f"/api/v0/logs/file?{query}")
        if answer.status_code == 404 or (answer.status_code != 200 and "not" in answer.text):
            return {}  # there is no such file yet
        try:
            return json.loads(answer.text[answer.text.index("{") :])  # Ray puts a digit before it
        except ValueError as error:
            raise PassingError(f"the queue's state cannot be read: {answer.text[:200]!r}; try again") from error

    def check_chips_wanted(self, request: Request) -> list[Host]:
        """The hosts that could hold the request if they were free. Raises InputError if there are none."""
        hosts = self.hosts()
        found = candidates(request, hosts)
        if not found:
            there = Counter(f"{host.chips} chips" + (f" of {host.kind}" if host.kind else "") for host in hosts)
            shown = ", ".join(f"{count} host{'s' * (count > 1)} with {what}" for what, count in sorted(there.items()))
            more = "" if request.hosts > 1 else "; more chips than a host has are a slice: --slice v5litepod-16"
            raise InputError(
                f"this cluster has nowhere {chips_wanted(request)}, and the run would wait for ever; it has "
                f"{shown or 'no chips'}{more}"
            )
        return [host for group in found for host in group]

    def job_named(self, name: str):
        """The job of this name, or None."""
        return next((job for job in self.jobs.list_jobs() if job.submission_id == name), None)

    def check_name(self, name: str) -> None:
        """Raises InputError where no run has this name."""
        if not self.job_named(name):
            raise InputError(f"no run {name!r} on this cluster; `python -m cluster list` shows those there are")

    def check_hosts(self) -> None:
        """Raises InputError where other users of a host could put their own code in place of what is submitted.

        Ray opens its folder to everybody (mode 777), so it belongs into one of its user's alone. Hosts that were found
        so are remembered on this machine by their ids, which are new at each start of Ray.
        """
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in self.nodes() if node["Alive"]}
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        known = cache / "tpu_cluster" / "hosts"  # a file for each: clients that start together write no file of another
        known.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(known, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # of clients that start together one asks, the others read its answer
            if not all((known / node).exists() for node in nodes):
                self._ask_hosts(nodes, known)
        finally:
            os.close(folder)

    def _ask_hosts(self, nodes: Mapping[str, str], known: Path) -> None:
        """check_hosts() by a job on the head. nodes: {id: address}; those that are closed get a file in `known`."""
        name = f"probe-{secrets.token_hex(8)}"
        self._submit(f"exec python -P -c {shlex.quote(PROBE.read_text())}", name)
        deadline = time.monotonic() + PROBE_SECONDS
        while self.jobs.get_job_status(name).value not in ENDED:
            if time.monotonic() > deadline:
                self.jobs.stop_job(name)
                raise PassingError(f"in {PROBE_SECONDS:.0f} s the head did not say where its files are; try again")
            time.sleep(0.2)
        log = self.jobs.get_job_logs(name)
        self.jobs.delete_job(name)
        try:
            found = json.loads(log.strip().rpartition("\n")[2])
        except ValueError as error:
            raise PassingError(f"the head did not say where Ray keeps its files: {log[-200:]!r}; try again") from error
        if bad := [(nodes.get(node, node), place) for node, place in found.items() if place]:
            raise InputError(
                f"host {bad[0][0]}: its other users can enter or rename {bad[0][1]}, where Ray has its files, and put "
                "their code in place of yours; expected a folder of mode 700 in folders that they cannot write: "
                "mkdir -m 700 FOLDER on every host, and ray start --temp-dir=FOLDER/ray"
            )
        for node in found.keys() & nodes.keys():
            if node.isalnum():  # an id of Ray's: no path
                (known / node).touch()

    def submit(self, spec: Spec, folder: Path, most_mib: float, variables: Mapping[str, str]) -> None:
        """Raises InputError for a name in use, a folder that is too large, and hosts that others can change."""
        request, name = spec.request, spec.request["name"]
        if former := self.job_named(name):
            owner = (former.metadata or {}).get("user", "?")
            if str(former.status.value) not in ENDED or owner != request["user"]:
                raise InputError(
                    f"name {name!r} is in use: {former.status.value} run of {owner}; choose another --name, or "
                    f"`python -m cluster stop {name}` if it is yours"
                )
        code = check_folder(folder, most_mib)
        self.check_hosts()
        if code.secrets:
            shown = ", ".join(code.secrets)
            print(f"note: not uploaded, as secrets have such names: {shown}; --env takes variables along")
        with tempfile.TemporaryDirectory() as made:
            modules = [str(HERE), str(HERE.parent / "tpu_utils")]
            if variables:
                modules.append(str(Path(made, SECRETS_MODULE)))
                Path(modules[-1]).mkdir(mode=0o700)
                Path(modules[-1], "__init__.py").write_text(f"VARIABLES = {dict(variables)!r}\n")
            # Each run has a package of its own. Where two had one, Ray removed what it had unpacked for the first, and
            # unpacked it again for the second (2.60, runtime_env/working_dir.py: overwrite=True).
            package = Path(made, "package")
            try:
                code.copy(package / "code")
            except OSError as error:
                raise InputError(
                    f"{error.filename} cannot be uploaded: {error.strerror}; add it to .rayignore"
                ) from error
            spec = dataclasses.replace(spec, code=f"{digest_of(package / 'code')}_{secrets.token_hex(8)}")
            Path(package, "code").rename(package / spec.code)
            environment = {
                "working_dir": str(package),
                "py_modules": modules,
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)},
            }
            entrypoint = f"exec python -P -m cluster.driver {shlex.quote(json.dumps(dataclasses.asdict(spec)))}"
            metadata = {"user": request["user"], "script": spec.script, "chips": str(request["chips"])}
            metadata |= {"hosts": str(request["hosts"]), "kind": request["kind"], "program": "python -m cluster"}
            # what submit_job() does first, in Ray's own private functions: then it cannot fail by it
            self._patiently(self.jobs._upload_working_dir_if_needed, environment)
            self._patiently(self.jobs._upload_py_modules_if_needed, environment)
            if former:  # the same run goes on under its name; nothing is refused here any more
                self.jobs.delete_job(name)
            self._submit(entrypoint, name, runtime_env=environment, metadata=metadata)

    def _submit(self, entrypoint: str, name: str, **settings) -> None:
        self._patiently(self.jobs.submit_job, entrypoint=entrypoint, submission_id=name, **settings)

    @staticmethod
    def _patiently(call: Callable, *given, **named) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                call(*given, **named)
                return
            except RuntimeError as error:
                if "try again later" not in str(error) or time.monotonic() > deadline:
                    raise PassingError(f"the cluster does not take the run: {first_line(error)}") from error
                time.sleep(1)  # the head has just begun, or has much to do

    def follow(self, name: str, say: Callable[[str], object]) -> int:
        """Passes the log on until the run has ended. Its exit code. Raises PassingError where the head has ended."""
        shown = 0  # characters; after a broken connection it goes on from there

        async def tail() -> None:
            nonlocal shown
            passed, begin = 0, ""
            async for part in self.jobs.tail_job_logs(name):
                if not passed:  # nothing but the preface so far
                    begin += part
                    part = without_preface(begin)
                if new := part[max(shown - passed, 0) :]:
                    say(new)
                passed += len(part)
                shown = max(shown, passed)

        while True:
            with contextlib.suppress(RuntimeError, OSError):  # the connection broke: it is made again
                asyncio.run(tail())
            try:
                job = self.jobs.get_job_info(name)
            except OSError as error:
                raise PassingError(f"the cluster's head is gone: {error}; the run is lost with it, see list") from error
            if str(job.status.value) in ENDED:
                say(without_preface(self.jobs.get_job_logs(name))[shown:])
                return exit_code(job)
            time.sleep(0.5)

    def log(self, name: str) -> str:
        self.check_name(name)
        return without_preface(self.jobs.get_job_logs(name))

    def stop(self, name: str) -> None:
        self.check_name(name)
        self.jobs.stop_job(name)


def without_preface(text: str) -> str:
    """The log without what Ray writes before the driver's own first line, which repeats the whole command."""
    return re.sub(r"\A(\d{4}-.*\n)*(Running entrypoint for job .*(\n|\Z))?", "", text)


def exit_code(job) -> int:
    """Exit code of a job that has ended: the driver's own; 143 if Ray stopped it; 1 if it was killed."""
    code = job.driver_exit_code
    if str(job.status.value) == "STOPPED":
        return 143
    return code if code is not None and code >= 0 else 0 if str(job.status.value) == "SUCCEEDED" else 1
