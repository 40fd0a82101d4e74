"""One run, from its turn in the queue to its exit code: python -m cluster.driver JSON, on the cluster's head.

After a fault it asks for its turn again, and the script goes on from its newest checkpoint (--resume auto).
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

from cluster.deciding import Place, Request
from cluster.host import HostProcess, device_variables
from cluster.turns import PROTOCOL, live_hosts, queue_of_cluster
from tpu_utils.base.hardware import parse_topology
from tpu_utils.base.restarts import options_in, to_go_on

ASK_SECONDS = 0.5
"""Between two questions to the queue while waiting."""
BEAT_SECONDS = 4.0
"""Between two questions once the run has its place; the queue forgets a run that is silent for 45 s."""
START_SECONDS = 120.0
"""How long the processes of all hosts may take to start; a host that dies meanwhile is noticed sooner."""
LAST_SECONDS = 20.0
"""How long other hosts may go on after one has failed: they may wait for ever in a collective."""
SECRETS_MODULE = "tpu_cluster_variables"


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the client submits."""

    request: dict
    script: str
    arguments: list[str]
    storage: str = ""  # for run directories; empty: the script takes no --run_dir and --resume
    folder: str = ""  # to run in; empty: a copy of the code uploaded
    retries: int = 3
    versions: dict = dataclasses.field(default_factory=dict)  # the client's package versions, which all hosts must have
    code: str = ""  # DIGEST_ANY: the name of the folder that was uploaded, and digest_of() it


class Moved(Exception):
    """The machine gave notice: the run has saved, and goes on elsewhere."""


class Lost(Exception):
    """A process, host or node died."""


class Stopped(Exception):
    """Somebody asked this run to end before it had started."""


def say(kind: str, text: str) -> None:
    print(f"{kind:<10} {text}", flush=True)


def arguments_for(spec: Spec, attempt: int) -> list[str]:
    """The script's options: a run directory where none is given, and --resume auto from the second start on."""
    if not spec.storage:
        return list(spec.arguments)
    given = list(spec.arguments)
    if "run_dir" not in options_in(given):
        given += ["--run_dir", f"{spec.storage.rstrip('/')}/{spec.request['name']}"]
    return to_go_on(given) if attempt else given


class Driver:
    def __init__(self, spec: Spec, variables: dict[str, str]):
        self.spec, self.variables = spec, variables
        self.request = Request(**spec.request | {"avoid": ()})
        self.stop_number = 0
        self.group, self.actors = None, []
        self.places: list[Place] = []
        self.queue = queue_of_cluster()

    def on_signal(self, number: int, frame) -> None:
        self.stop_number = number

    def ask(self, places: list[Place] | None = None) -> dict:
        """The queue's answer. If the queue has died, Ray restarts it, and the same question is asked again."""
        import ray

        held = [list(place) for place in places] if places else None
        for tried in range(60):
            try:
                return ray.get(self.queue.ask.remote(PROTOCOL, dataclasses.asdict(self.request), held), timeout=60)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                time.sleep(1)
            except ray.exceptions.ActorDiedError:
                self.queue = queue_of_cluster()
                time.sleep(min(tried, 5))
        raise Lost("the queue does not answer")

    def turn(self) -> list[Place]:
        """The places, once the run may start. Raises ValueError if the queue refuses, Stopped if it was stopped."""
        said = ""
        while not self.stop_number:
            answer = self.ask()
            if "refused" in answer:
                raise ValueError(answer["refused"])
            if "places" in answer:
                return [Place(node, tuple(chips)) for node, chips in answer["places"]]
            if answer["waits"] != said:
                said = answer["waits"]
                say("queue", said)
            time.sleep(ASK_SECONDS)
        raise Stopped

    def get(self, refs: list) -> list:
        """ray.get(refs) that keeps telling the queue of this run: on a busy machine processes take long to start."""
        import ray

        deadline = time.monotonic() + START_SECONDS
        while len(ray.wait(refs, num_returns=len(refs), timeout=BEAT_SECONDS)[0]) < len(refs):
            if "lost" in (answer := self.ask(self.places)):
                raise Lost(answer["lost"])
            if time.monotonic() > deadline:
                raise Lost(f"its processes were not there after {START_SECONDS:.0f} s")
        return ray.get(refs)

    def take(self, places: Sequence[Place]) -> list[dict]:
        """Start an actor on each host, which reserves its chips in Ray; a slice is one placement group. Their facts."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        chips = self.request.chips
        hosts = {host.node: host for host in live_hosts()}
        if any(place.node not in hosts for place in places):
            raise Lost("a host of its place is gone")
        if len(places) > 1:
            from ray.util.tpu import slice_placement_group

            # the queue has chosen the slice, so Ray reserves this one
            labels = {"ray.io/tpu-slice-name": hosts[places[0].node].slice_name}
            self.group = slice_placement_group(
                topology="x".join(map(str, parse_topology(self.request.kind).shape)),
                accelerator_version=self.request.kind.rpartition("-")[0],
                chips_per_vm=chips,
                resources_per_bundle={"TPU": chips, "CPU": 0.001},
                bundle_label_selector=[labels] * len(places),
            )
            self.get([self.group.placement_group.ready()])
            strategies = [
                PlacementGroupSchedulingStrategy(self.group.placement_group, placement_group_bundle_index=index)
                for index in range(len(places))
            ]
        else:
            strategies = [NodeAffinitySchedulingStrategy(places[0].node, soft=False)]
        options = {"num_cpus": 0, "resources": {"TPU": chips}, "max_concurrency": 4}
        options["runtime_env"] = {"env_vars": {"RAY_worker_niceness": "0"}}  # a training is no background task
        kind = ray.remote(HostProcess)
        self.actors = [kind.options(scheduling_strategy=strategy, **options).remote() for strategy in strategies]
        facts = self.get([actor.facts.remote() for actor in self.actors])
        by_node = {fact["node"]: (actor, fact) for actor, fact in zip(self.actors, facts, strict=True)}
        self.actors = [by_node[place.node][0] for place in places]  # Ray's order of bundles is not that of workers
        return [by_node[place.node][1] | {"host": hosts[place.node]} for place in places]

    def check(self, facts: Sequence[dict]) -> None:
        """Raises ValueError for a host whose other users can change what runs, or that has other versions than the
        command that was given, or than the first host."""
        expected = facts[0]["versions"] | self.spec.versions
        for fact in facts:
            if place := fact["open"]:  # it joined the cluster after the run was submitted, or did not answer then
                raise ValueError(
                    f"host {fact['host'].address}: its other users can enter or rename {place}, where Ray has its "
                    "files; expected a folder of mode 700, see cluster/README.md; start Ray there again, then the run"
                )
            for name, wanted in expected.items():
                found = fact["versions"].get(name, "none")
                if found != wanted:
                    raise ValueError(
                        f"host {fact['host'].address} has {name} {found}, expected {wanted} as here; install the same "
                        "requirements.txt on every host, with the same Python"
                    )

    def attempt(self, number: int) -> int:
        """One start of the script on all its hosts. Its exit code; raises Moved or Lost."""
        import ray

        places = self.places = self.turn()
        try:
            facts = self.take(places)
            self.check(facts)
            addresses = [fact["host"].address for fact in facts]
            shown = "; ".join(
                f"host {fact['host'].address} ({fact['node'][:8]}), chips {','.join(map(str, place.chips))}"
                for fact, place in zip(facts, places, strict=True)
            )
            say("placed", shown + ("" if facts[0]["tpu"] else ", virtual devices of the CPU"))
            command = [self.spec.script, *arguments_for(self.spec, number)]
            starting = []
            for index, (actor, fact, place) in enumerate(zip(self.actors, facts, places, strict=True)):
                host = fact["host"]
                devices = device_variables(place.chips, host.chips, fact["tpu"], host.kind, index, addresses)
                settings = self.request.name, self.spec.folder, self.spec.code, command, self.variables | devices
                starting.append(actor.start.remote(*settings))
            if refused := [said for said in self.get(starting) if said]:
                raise ValueError(refused[0])
            return self.follow(places)
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
            raise Lost(f"a worker or its host died ({type(error).__name__})") from error
        finally:
            self.let_go()

    def follow(self, places: Sequence[Place]) -> int:
        """Passes output on until all have ended."""
        import ray

        codes: dict[int, int] = {}
        rest: dict[int, bytes] = {}
        pending = {actor.follow.remote(1.0): index for index, actor in enumerate(self.actors)}
        beat = time.monotonic()
        told = 0
        ended = None
        while pending:
            if self.stop_number and not told:
                told = self.stop_number
                say("stop", f"asked to stop: {signal.Signals(told).name} to the script, which saves")
                ray.get([actor.signal.remote(told) for actor in self.actors])
            ready, _ = ray.wait(list(pending), timeout=1.0)
            for ref in ready:
                index = pending.pop(ref)
                text, code = ray.get(ref)
                if len(self.actors) > 1:  # whole lines, each with its host
                    *lines, rest[index] = (rest.get(index, b"") + text).split(b"\n")
                    lines += [rest[index]] if code is not None and rest[index] else []
                    text = b"".join(b"host %d  %s\n" % (index, line) for line in lines)
                sys.stdout.flush()
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
                if code is None:
                    pending[self.actors[index].follow.remote(1.0)] = index
                else:
                    codes[index] = code
            if codes and ended is None:
                ended = time.monotonic()
            if pending and ended and time.monotonic() - ended > LAST_SECONDS and any(codes.values()):
                break  # let_go() kills the others
            if time.monotonic() - beat > BEAT_SECONDS:
                beat = time.monotonic()
                if "lost" in (answer := self.ask(places)):
                    raise Lost(answer["lost"])
        return self.judge(codes)

    def judge(self, codes: dict[int, int]) -> int:
        """The exit code of the run. Raises Lost for a death by a signal, Moved for a notice."""
        for code in codes.values():
            if code > 0 and code != 143:
                return code  # the script's own: bad input, or failed
        if self.stop_number:
            return 128 + self.stop_number if any(codes.values()) else 0
        for index, code in sorted(codes.items()):
            if code < 0:
                raise Lost(f"the script on host {index} was killed by signal {-code}")
        if 143 in codes.values():
            raise Moved
        return 0

    def let_go(self) -> None:
        """Kill the actors that are left and give their chips back to Ray. Only then may another run have them."""
        import ray

        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self.group is not None:
            with contextlib.suppress(Exception):
                self.group.shutdown()
        self.group, self.actors = None, []

    def release(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.queue.release.remote(self.request.name), timeout=20)

    def run(self) -> int:
        """Exit code of the run."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and so do we
                signal.signal(number, self.on_signal)
        left_for_good: set[str] = set()
        for number in range(self.spec.retries + 1):
            try:
                return self.attempt(number)
            except Stopped:
                say("stop", "stopped while it waited")
                return 128 + self.stop_number
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                return 2
            except Moved:
                cause = "the machine gave notice"
                left_for_good |= {place.node for place in self.places}
            except Lost as error:
                cause = str(error)
            finally:
                self.release()
            if self.stop_number:
                return 128 + self.stop_number
            left = self.spec.retries - number
            say("fault", f"{cause}; " + (f"starting again, {left} times at most" if left else "and no retry is left"))
            # prefer other hosts; the sleep gives Ray time to notice what died
            avoid = left_for_good | {place.node for place in self.places}
            self.request = dataclasses.replace(self.request, avoid=tuple(sorted(avoid)))
            if left:
                time.sleep(min(2.0**number, 30.0))
        return 1


def secret_variables() -> dict[str, str]:
    """The variables of --env, uploaded as a module beside the code, so that Ray does not show them with the job."""
    try:
        import tpu_cluster_variables
    except ImportError:
        return {}
    return dict(tpu_cluster_variables.VARIABLES)


def main(arguments: list[str]) -> int:
    import ray

    spec = Spec(**json.loads(arguments[0]))
    ray.init(log_to_driver=False, logging_level="ERROR")
    return Driver(spec, secret_variables()).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # Ray's own farewell takes seconds, and all is let go
