"""The queue: one named actor for the cluster, on the head, which says whose turn it is.

Every run's driver asks again and again, and the queue knows nothing else. A run whose driver is silent for
SILENT_SECONDS is gone. A restarted queue waits SETTLE_SECONDS for drivers to tell it their chips. It writes this to a
file among Ray's logs, which Ray's dashboard hands out: so `top` needs no process on the cluster.
"""

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cluster.deciding import Host, Place, Request, candidates, decide, limit_of

NAME, NAMESPACE = "turns", "tpu_cluster"
STATE_FILE = "tpu_cluster.json"
QUOTA_VARIABLE = "TPU_CLUSTER_QUOTA"
"""On the head, before `ray start`: a JSON file {"alice": 8, "*": 4}, chips at a time; read again when it changes."""
PROTOCOL = 1
"""Between drivers and the queue. One that speaks another is refused: two queues would give chips away twice."""
SILENT_SECONDS = 45.0
SETTLE_SECONDS = 6.0
LOOK_SECONDS = 5.0
"""How often silent runs are dropped while nobody asks, so that `top` does not show them."""
MOST_EVENTS = 2000


def read_quota(path: str) -> dict[str, int]:
    """Raises ValueError with what was found and what is expected."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"quota file {path} cannot be read: {error}; expected JSON such as {{'*': 4}}") from error
    if not isinstance(found, dict) or not all(type(n) is int and n >= 0 for n in found.values()):
        raise ValueError(f'quota file {path} holds {found!r:.80}; expected chips by user, as {{"alice": 8, "*": 4}}')
    return found


@dataclasses.dataclass
class Entry:
    """A run that waits or runs."""

    request: Request
    asked: float
    places: list[Place] | None = None
    started: float = 0.0


class Turns:
    """hosts(): the live hosts of the cluster. state_file: where it writes what it knows. clock: seconds."""

    def __init__(
        self,
        hosts: Callable[[], list[Host]],
        state_file: Path,
        quota_file: str = "",
        restarted: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        self.find_hosts = hosts
        self.state_file = state_file
        self.quota_file = quota_file
        self.clock = clock
        self.entries: dict[str, Entry] = {}
        self.events: list[dict] = []
        self.quota: dict[str, int] = {}
        self.quota_problem = ""
        self.hosts: list[Host] = []
        self.hosts_read = self.written = -1e9
        self.settled = clock() + (SETTLE_SECONDS if restarted else 0.0)
        self.counted = clock()
        self.busy_seconds = self.chip_seconds = 0.0

    def ask(self, protocol: int, wanted: dict, places: list | None = None) -> dict:
        """{"places": [[node, chips], ...]} when it is this run's turn, else {"waits": a sentence}, or {"refused": one}.

        places: what the run has, as it was told before. Safe to repeat.
        """
        if protocol != PROTOCOL:
            return {
                "refused": f"the cluster's queue speaks version {PROTOCOL}, this command {protocol}; use the same "
                "commit of this project as the others, or end all runs and stop the queue (cluster/README.md)"
            }
        now, request = self.clock(), Request(**wanted)
        entry = self.entries.get(request.name)
        if entry is None:
            entry = self.entries[request.name] = Entry(request, now)
            self.log_event("runs on" if places else "waits", entry)
        entry.asked, entry.request = now, request
        if places and not entry.places:  # this queue was restarted, or the run was silent
            others = [place for e in self.entries.values() for place in e.places or []]
            if any(node == other.node and {*chips} & {*other.chips} for node, chips in places for other in others):
                self.release(request.name)
                return {"lost": "its chips were given to another run after it had been silent"}
            entry.places, entry.started = [Place(node, tuple(chips)) for node, chips in places], now
        limit = limit_of(request.user, self.read_quota())
        if request.all_chips > limit and not entry.places:
            self.release(request.name)
            return {"refused": f"{request.user} may have {limit} chips at a time, and asks for {request.all_chips}"}
        self.update(now)
        if entry.places:
            return {"places": [list(place) for place in entry.places]}
        return {"waits": self.reason(entry, now)}

    def update(self, now: float) -> None:
        """Forget who is silent, start whom decide() names, write the state."""
        if now - self.hosts_read > 0.5:
            self.hosts, self.hosts_read = self.find_hosts(), now
        for name, entry in list(self.entries.items()):
            if now - entry.asked > SILENT_SECONDS:
                self.log_event("lost", entry)
                del self.entries[name]
        running = {n: (e.request.user, e.places) for n, e in self.entries.items() if e.places}
        chips = sum(host.chips for host in self.hosts)
        in_use = sum(len(place.chips) for _, places in running.values() for place in places)
        self.busy_seconds += in_use * (now - self.counted)
        self.chip_seconds += chips * (now - self.counted)
        self.counted = now
        changed = False
        if now >= self.settled:
            waiting = [entry.request for entry in self.entries.values() if not entry.places]
            for name, places in decide(self.hosts, running, waiting, self.quota).items():
                self.entries[name].places, self.entries[name].started = places, now
                self.log_event("starts", self.entries[name])
                changed = True
        if changed or now - self.written > 0.5:
            self.write(now)

    def reason(self, entry: Entry, now: float) -> str:
        request = entry.request
        if now < self.settled:
            return "the queue was restarted, and asks who runs"
        waiting = sorted((e.request for e in self.entries.values() if not e.places), key=lambda r: r.order)
        turn = f"{waiting.index(request) + 1} of {len(waiting)} waiting"
        mine = sum(e.request.all_chips for e in self.entries.values() if e.places and e.request.user == request.user)
        limit = limit_of(request.user, self.quota)
        if mine + request.all_chips > limit:
            return f"{turn}; {request.user} has {mine} of {limit} chips, and asks for {request.all_chips}"
        if not candidates(request, self.hosts):
            return f"{turn}; no live host or slice has {chips_wanted(request)}"
        return f"{turn}; for {chips_wanted(request)}"

    def release(self, name: str) -> None:
        """The run has let its chips go, or given up its turn. Safe to repeat."""
        if entry := self.entries.pop(name, None):
            self.log_event("ends" if entry.places else "leaves", entry)
            self.update(self.clock())
            self.write(self.clock())

    def log_event(self, what: str, entry: Entry) -> None:
        event = {"time": self.clock(), "what": what, "name": entry.request.name, "user": entry.request.user}
        event["places"] = entry.places or []
        self.events = [*self.events[1 - MOST_EVENTS :], event]

    def read_quota(self) -> dict[str, int]:
        """The quotas as the file has them now. A damaged file leaves those that were; top says so."""
        if self.quota_file:
            try:
                self.quota = read_quota(self.quota_file)
                self.quota_problem = ""
            except ValueError as error:
                self.quota_problem = str(error)
        return self.quota

    def state(self) -> dict:
        def shown(entry: Entry) -> dict:
            more = {"chips": entry.request.all_chips, "places": entry.places or [], "started": entry.started}
            return dataclasses.asdict(entry.request) | more

        entries = sorted(self.entries.values(), key=lambda entry: entry.request.order)
        return {
            "time": self.clock(),
            "running": [shown(entry) for entry in entries if entry.places],
            "waiting": [shown(entry) for entry in entries if not entry.places],
            "quota": self.quota,
            "quota_problem": self.quota_problem,
            "busy_seconds": self.busy_seconds,  # chips in use, and all chips, times seconds
            "chip_seconds": self.chip_seconds,
            "events": self.events,
        }

    def write(self, now: float) -> None:
        """One line, put in place whole: a reader never sees a half."""
        aside = self.state_file.with_suffix(".writing")
        aside.write_text(json.dumps(self.state()) + "\n")
        aside.replace(self.state_file)
        self.written = now


def chips_wanted(request: Request) -> str:
    chips = f"{request.chips} chip{'s' * (request.chips > 1)}"
    if request.hosts > 1:
        return f"a whole {request.kind}: {request.hosts} hosts x {chips}"
    return chips + (f" of {request.kind.rpartition('-')[0]}" if request.kind else "")


def host_of(node: dict) -> Host | None:
    """The Host of an entry of ray.nodes(); None where it is dead or has no chips."""
    labels, chips = node.get("Labels") or {}, int(node.get("Resources", {}).get("TPU", 0))
    if not node.get("Alive") or chips < 1:
        return None
    worker = labels.get("ray.io/tpu-worker-id", "0")
    return Host(
        node["NodeID"],
        chips,
        labels.get("ray.io/tpu-pod-type", ""),
        labels.get("ray.io/tpu-slice-name", ""),
        int(worker) if worker.isdecimal() else 0,
        node.get("NodeManagerAddress", ""),
    )


def live_hosts() -> list[Host]:
    import ray

    return [host for node in ray.nodes() if (host := host_of(node))]


def queue_of_cluster():
    """The handle of the cluster's queue; whoever comes first creates it."""
    import ray

    class Actor(Turns):
        def __init__(self):
            logs = Path(ray._private.worker._global_node.get_logs_dir_path())
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
            super().__init__(live_hosts, logs / STATE_FILE, os.environ.get(QUOTA_VARIABLE, ""), restarted)
            self.one_at_a_time = threading.RLock()
            threading.Thread(target=self.look, daemon=True).start()

        def look(self) -> None:
            while True:
                time.sleep(LOOK_SECONDS)
                with self.one_at_a_time:
                    self.update(self.clock())

        def ask(self, *arguments) -> dict:
            with self.one_at_a_time:
                return super().ask(*arguments)

        def release(self, name: str) -> None:
            with self.one_at_a_time:
                super().release(name)

    actor = ray.remote(Actor).options(
        name=NAME,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
    )
    return actor.remote()
