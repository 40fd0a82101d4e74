"""TPU VM, GKE, Colab and Kaggle as pretended machines: the hosts, what torch_xla then finds, what is refused.

Variables as found in: Google's tpu-device-plugin for GKE (its own tests), and its webhook for jobs with several pods;
printed environments of Colab (v5e-1) and Kaggle (v5e-8).
"""

import contextlib
import math
import os
import re
import shlex
import socket
from types import SimpleNamespace

import pytest
import torch_xla
import yaml
from metadata_server import metadata_server
from processes import ROOT
from test_device import fake_pci
from torch_xla._internal import tpu

from config import DistributedMnistConfig, MnistConfig
from tpu_utils.base.errors import DeviceError, InputError, run_script
from tpu_utils.base.hardware import GENERATIONS
from tpu_utils.options import environment as environment_module
from tpu_utils.options.environment import attached_chips, choose_device
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.remote import hosts as hosts_module
from tpu_utils.remote import meeting as peers_module
from tpu_utils.remote.hosts import read_secret, settle_hosts
from tpu_utils.remote.meeting import Meeting

GKE = dict(TPU_SKIP_MDS_QUERY="true", VBAR_CONTROL_SERVICE_URL="unix:///var/run/tpu-plugin/vbar.sock")
ONE = dict(TPU_WORKER_ID="0", TPU_WORKER_HOSTNAMES="localhost", TPU_HOST_BOUNDS="1,1,1")
PODS = [f"job-{i}.svc" for i in range(4)]
COLAB = dict(COLAB_TPU_1VM="1", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5e-1", TPU_CHIPS_PER_HOST_BOUNDS="2,2,1")
KAGGLE = dict(ISTPUVM="1", TPU_PROCESS_ADDRESSES="local", TPU_CHIPS_PER_HOST_BOUNDS="2,4,1", **ONE)
IPS = [f"10.0.0.{i}" for i in range(4)]


def vm(kind: str, count: int, index: int, **bounds: str) -> dict:
    """A TPU VM's attributes."""
    fields = dict(ACCELERATOR_TYPE=kind, WORKER_ID=index, ZONE="us-west4-a", **bounds)
    workers = [f"t1v-n-{i}-w-{i}:{i}:10.0.0.{i}" for i in range(count)]
    tpu_env = "".join(f"{name}: '{value}'\n" for name, value in fields.items())
    return {"tpu-env": tpu_env, "worker-network-endpoints": ",".join(workers)}


BOUNDS_8 = dict(TPU_PROCESS_BOUNDS="1,1,1", TPU_CHIPS_PER_PROCESS_BOUNDS="2,4,1")
# name: (chips, environment, metadata or None for no server, expected index and addresses, accelerator type)
MACHINES = {
    "VM of one host": ("v5e", 8, {}, vm("v5litepod-8", 1, 0, **BOUNDS_8), (0, ["localhost"]), "v5litepod-8"),
    "VM, third of four": ("v5e", 4, {}, vm("v5litepod-16", 4, 2), (2, IPS), "v5litepod-16"),
    "VM, variables that agree": ("v6e", 8, ONE, vm("v6e-8", 1, 0, **BOUNDS_8), (0, ["localhost"]), "v6e-8"),
    "GKE, one pod": (
        "v5e", 8, {**GKE, **ONE, "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}, {},
        (0, ["localhost"]), "v5litepod-8",
    ),
    "GKE, fourth of four pods": (
        "v5e", 4,
        {**GKE, "TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_HOST_BOUNDS": "2,2,1",
         "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": ",".join(PODS)}, {},
        (3, PODS), "v5litepod-16",
    ),
    "GKE, one pod that is told neither index nor hosts": (  # tpu7x, as the plugin has it
        "TPU7x", 4, {**GKE, "TPU_ACCELERATOR_TYPE": "tpu7x-8", "TPU_HOST_BOUNDS": "1,1,1",
                     "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, None,
        (0, ["localhost"]), "tpu7x-8",
    ),
    "GKE, a part of a machine's chips": (
        "v6e", 8, {**GKE, **ONE, "TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, None,
        (0, ["localhost"]), "v6e-4",
    ),
    "Colab": ("v5e", 1, {**COLAB, **ONE}, {}, (0, ["localhost"]), "v5e-1"),
    "Colab, a type alone": ("v5e", 1, COLAB, {}, (0, ["localhost"]), "v5e-1"),
    "Kaggle": ("v5e", 8, KAGGLE, {}, (0, ["localhost"]), "v5litepod-8"),
    "Kaggle, without a network": ("v5e", 8, KAGGLE, None, (0, ["localhost"]), "v5litepod-8"),
    "Kaggle, as of its image alone": (
        "v5e", 8, {"ISTPUVM": "1", "TPU_PROCESS_ADDRESSES": "local"}, {}, (0, ["localhost"]), "v5litepod-8",
    ),
    "a machine that says nothing": ("v4", 4, {}, None, (0, ["localhost"]), "v4-8"),
    "four hosts by hand": (
        "v5p", 4, {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": ",".join(IPS)}, None, (1, IPS), "v5p-32",
    ),
}  # fmt: skip


@pytest.fixture
def server():
    with metadata_server() as made:
        yield made


@pytest.fixture
def machine(monkeypatch, tmp_path, server):
    """machine(chip, number, variables, metadata): this process is on it, for our code and for torch_xla. Its chips."""
    before = dict(os.environ)
    asked = ("TPU_", "CLOUD_TPU", "PJRT_", "LIBTPU")

    def pretend(chip, number, variables, metadata):
        for name in [name for name in os.environ if name.startswith(asked)]:
            del os.environ[name]
        host = "127.0.0.1:1" if metadata is None else server.host
        os.environ.update(variables, GCE_METADATA_HOST=host)
        server.pages = metadata or {}
        fake_pci(tmp_path, *[("0x1ae0", GENERATIONS[chip].pci_id)] * number)
        bus = SimpleNamespace(glob=lambda pattern: map(str, tmp_path.glob(pattern.rpartition("devices/")[2])))
        monkeypatch.setattr(tpu, "_GCE_METADATA_ROOT_URL", f"http://{host}/computeMetadata/v1")
        monkeypatch.setattr(tpu, "glob", bus)
        monkeypatch.setattr(environment_module, "attached_chips", lambda: attached_chips(tmp_path))
        return attached_chips(tmp_path)

    yield pretend
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("name", MACHINES)
def test_hosts_and_what_torch_xla_finds(machine, server, name):
    """Its import (_setup_default_env is what asks) and, on one host, the topology of a process for each chip."""
    chip, number, variables, metadata, (index, addresses), kind = MACHINES[name]
    chips = machine(chip, number, variables, metadata)
    assert settle_hosts(chips) == (index, addresses)
    assert not (server.asked and variables.get("TPU_SKIP_MDS_QUERY")), "a server that must not be asked is not"
    torch_xla._setup_default_env()
    assert (tpu.worker_id(), tpu.get_worker_ips(), tpu.num_tpu_workers()) == (index, addresses, len(addresses))
    assert tpu.num_available_chips() == number
    assert tpu.get_tpu_env()["ACCELERATOR_TYPE"] == kind and tpu.version() == int(kind.strip("tpuv")[0])
    assert {name: os.environ[name] for name in variables} == variables, "what was said is left as it was"
    assert settle_hosts(chips) == (index, addresses), "the second time as the first"
    if len(addresses) == 1:
        tpu.configure_topology(local_rank=0, local_world_size=number)
        assert os.environ["CLOUD_TPU_TASK_ID"] == "0" and os.environ["TPU_PROCESS_PORT"] == "8476"
        assert os.environ["TPU_PROCESS_BOUNDS"] and os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"


def test_what_is_assumed_is_said_once(machine, capsys):
    chips = machine("v5e", 8, {}, {})
    settle_hosts(chips)
    settle_hosts(chips)
    said = "host       0 of 1: neither the environment nor a metadata server names others\n"
    assert capsys.readouterr().out == said
    settle_hosts(chips, dict(LOCAL_RANK="3"))  # torchrun: the first of its processes has said it
    settle_hosts(chips, dict(KAGGLE))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("device", ["tpu", "cpu"])  # chips alone make torch_xla ask
def test_the_device_is_chosen_and_the_hosts_settled_before_torch_xla_is_imported(machine, device):
    machine("v6e", 4, {}, None)
    assert choose_device(MnistConfig(device=device)) == device
    assert (os.environ["TPU_SKIP_MDS_QUERY"], os.environ["TPU_ACCELERATOR_TYPE"]) == ("1", "v6e-4")
    torch_xla._setup_default_env()


FOUR = vm("v5litepod-16", 4, 2)
MANY = dict(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES=",".join(PODS))
REFUSED = {  # chips on this host, environment, metadata: message
    "an index outside": (4, MANY | {"TPU_WORKER_ID": "4"}, "index 4, but TPU_WORKER_HOSTNAMES names 4, .* 0 to 3; "),
    "an index alone": (4, {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "2"}, "index 2, but .* names 1, .* name all"),
    "no index": (4, MANY, "names 4 hosts, but nothing says which .*; set TPU_WORKER_ID to its position, 0 to 3"),
    "no number": (4, MANY | {"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID is 'x', expected this host's index"),
    "a negative index": (4, MANY | {"TPU_WORKER_ID": "-1"}, "TPU_WORKER_ID is '-1', expected"),
    "a text for hosts": (  # seen as a value where nobody had found the hosts
        1, {"TPU_WORKER_HOSTNAMES": "WARNING: could not determine TPU worker hostnames, please set"},
        "expected names or addresses of hosts with commas between",
    ),
    "an empty host": (4, MANY | {"TPU_WORKER_HOSTNAMES": "a,,b"}, "'a,,b', expected names"),
    "one of four pods, said to be alone": (  # a set of pods that GKE's webhook does not know
        4, {**GKE, **ONE, "TPU_ACCELERATOR_TYPE": "v5litepod-16"},
        "v5litepod-16 has 16 chips, but this is 1 of 1 hosts with 4 chips each; name all hosts in TPU_WORKER_HOSTNAMES",
    ),
    "a type of GKE's labels": (4, GKE | {"TPU_ACCELERATOR_TYPE": "tpu-v5-lite-podslice"}, "expected one such as v5li"),
    "another index than the metadata's": (4, {"TPU_WORKER_ID": "1"}, FOUR, "TPU_WORKER_ID is 1, but the VM's"),
    "other hosts than the metadata's": (4, {"TPU_WORKER_HOSTNAMES": "localhost"}, FOUR, "is localhost, but the VM's"),
    "another type than the metadata's": (4, {"TPU_ACCELERATOR_TYPE": "v5litepod-4"}, FOUR, "is v5litepod-4, but the"),
    "metadata with an index outside": (4, {}, vm("v5litepod-16", 4, 4), "4, but the VM's metadata names 4, expected"),
    "metadata without an index": (4, {}, vm("v5litepod-16", 4, ""), "metadata names 4 hosts, but nothing says"),
    "not to ask, and nothing said": (4, {"TPU_SKIP_MDS_QUERY": "1"}, "nothing says whether this host with 4 chips is"),
    "a VM that lost a chip": (7, {}, vm("v5litepod-8", 1, 0), "has 8 chips, .* 7 chips each; .* must be made anew"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_with_exit_code_2(machine, capsys, name):
    number, variables, *metadata, message = REFUSED[name]
    machine("v5e", number, variables, metadata[0] if metadata else None)
    before = dict(os.environ)
    assert run_script(lambda: choose_device(MnistConfig(device="tpu"))) == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)
    assert not [name for name in os.environ if name.startswith("TPU_") and os.environ[name] != before.get(name)]


@pytest.mark.parametrize(
    "variables", [{"TPU_VISIBLE_CHIPS": "0"}, {"TPU_PROCESS_BOUNDS": "1,1,1"}, {"TPU_ACCELERATOR_TYPE": "v4-512"}]
)
def test_what_is_no_certain_contradiction_is_not_refused(machine, variables):
    """A slice divided on purpose; a type of other chips than are seen."""
    chips = machine("v5e", 4, {**GKE, **ONE, "TPU_ACCELERATOR_TYPE": "v5litepod-16", **variables}, None)
    assert settle_hosts(chips) == (0, ["localhost"])


def test_one_task_for_each_host_is_an_index_too(machine):
    """torch_xla prefers CLOUD_TPU_TASK_ID to TPU_WORKER_ID; beside metadata it sets it itself, for each process."""
    assert settle_hosts(machine("v5e", 4, MANY | {"CLOUD_TPU_TASK_ID": "2"}, None)) == (2, PODS)
    assert tpu.worker_id() == 2
    assert hosts_module.in_environment({"CLOUD_TPU_TASK_ID": "9"}).index is None


# ---------------------------------------------------------------------------------------------- the metadata server
ANSWERS = {  # what the server of a pod does: the error
    **{str(code): (dict(code=code), f"answers {code} to tpu-env, and nothing") for code in (403, 408, 429, 500, 503)},
    "no hosts": (dict(pages={"tpu-env": FOUR["tpu-env"]}), "WORKER_ID '2' .* worker-network-endpoints None.* start"),
    "hosts without addresses": (dict(pages=FOUR | {"worker-network-endpoints": "a,b"}), "endpoints 'a,b', .* start"),
    "a page that is not Google's": (dict(flavor="portal"), ""),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_server_that_fails_is_not_taken_for_none(machine, server, answer):
    """The hosts of a pod would each train alone."""
    chips = machine("v5e", 4, {}, FOUR)
    changes, said = ANSWERS[answer]
    vars(server).update(changes)
    if said:
        with pytest.raises(DeviceError, match=said):
            settle_hosts(chips)
    else:
        assert settle_hosts(chips) == (0, ["localhost"])


@pytest.mark.parametrize("number", [8, 4])
def test_silence_is_no_metadata_only_where_a_host_is_a_slice_by_itself(machine, monkeypatch, number):
    """The server takes the call and says nothing. With 4 chips a host may be one of several, and never trains alone."""
    assert hosts_module.SILENT_SECONDS <= 2 and hosts_module.KNOWN_SECONDS >= 20
    monkeypatch.setattr(hosts_module, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(hosts_module, "KNOWN_SECONDS", 0.2)
    chips = machine("v5e", number, {}, None)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{silent.getsockname()[1]}")
        if number == 8:
            assert settle_hosts(chips) == (0, ["localhost"])
            assert os.environ["TPU_SKIP_MDS_QUERY"] == "1", "or torch_xla would wait for it, with no limit"
        else:
            with pytest.raises(DeviceError, match=r"does not answer .* nothing else says whether this host is one of"):
                settle_hosts(chips)


def test_a_late_answer_is_waited_for(machine, server, monkeypatch):
    monkeypatch.setattr(hosts_module, "SILENT_SECONDS", 0.1)
    chips, server.delay = machine("v5e", 4, {}, FOUR), 0.4
    assert settle_hosts(chips) == (2, IPS)


@pytest.mark.parametrize(
    "page, change, secret",
    [
        ("0123456789abcdef", {}, b"0123456789abcdef"),
        (None, {}, b""),  # the slice was made without one
        ("short", {}, "peers-secret of the VM's metadata holds 5 bytes, expected at least 16"),
        ("0123456789abcdef", dict(code=503), "the metadata server answers 503 to peers-secret; start again"),
        ("<html>Please log in</html>", dict(flavor="portal"), "to peers-secret; start again"),  # others may know it too
    ],
)
def test_the_secret_of_the_slice_is_read_or_the_run_ends(machine, server, page, change, secret):
    """Without it this host would let in whoever calls, and not be let in by the others."""
    machine("v5e", 4, {}, FOUR if page is None else FOUR | {"peers-secret": page})
    vars(server).update(change)
    if isinstance(secret, bytes):
        assert read_secret("") == secret
        return
    with pytest.raises((InputError, DeviceError), match=secret):
        read_secret("")


# ------------------------------------------------------------------------------------------------------ pods have names
def test_host_0_waits_until_a_pod_has_its_name(monkeypatch):
    look_up, asked = socket.getaddrinfo, []

    def unknown_at_first(name, *arguments, **options):
        asked.append(name)
        if asked.count("job-1.svc") == 1 and name == "job-1.svc":
            raise socket.gaierror(-2, "Name or service not known")
        return look_up("127.0.0.1" if name == "job-1.svc" else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", unknown_at_first)
    monkeypatch.setattr(peers_module, "_gather_links", lambda listener, *_: listener.close() or "met")
    assert peers_module._meet(0, Meeting(["127.0.0.1", "job-1.svc"]), 60.0, 0) == "met"
    assert asked.count("job-1.svc") > 1


def test_a_pod_that_never_has_a_name_is_named(monkeypatch):
    def unknown(name, *_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DeviceError, match=r"for host 0 \(job-0\.svc\): no such name: Name or service not known"):
        peers_module._meet(0, Meeting(["job-0.svc", "job-1.svc"]), 0.0, 0)


# --------------------------------------------------------------------------------------- docs/colab_kaggle_gke.md
PAGE = (ROOT / "docs" / "colab_kaggle_gke.md").read_text()
MANIFESTS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
CONFIGS = {"simple_mnist_tpu.py": MnistConfig, "distributed_mnist_tpu.py": DistributedMnistConfig}


def check_options(words: list[str], tmp_path) -> None:
    words = [word.replace("gs://BUCKET", str(tmp_path)) for word in words]
    assert parse_command_line(CONFIGS[words[0]], "", words[1:]).resume == "auto"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=["one pod", "several pods"])
def test_the_pods_of_the_page_are_started_right(machine, tmp_path, manifest):
    """Their topology, chips and number agree, and so do the variables that GKE then sets."""
    job = manifest["spec"] if manifest["kind"] == "Job" else manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod, count = job["template"]["spec"], job.get("parallelism", 1)
    (container,) = pod["containers"]
    assert container["securityContext"]["privileged"] and pod["terminationGracePeriodSeconds"] == 120
    check_options([*container["command"][1:], *container["args"]], tmp_path)
    assert job.get("completions", 1) == count and pod["restartPolicy"] == "Never"  # podFailurePolicy wants it
    (given_up,) = (rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert given_up == {"containerName": container["name"], "operator": "In", "values": [2]}
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    total = math.prod(map(int, topology.split("x")))
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert chips == container["resources"]["requests"]["google.com/tpu"] and chips * count == total
    hosts = {"TPU_WORKER_ID": str(count - 1), "TPU_WORKER_HOSTNAMES": ",".join(PODS[:count])} if count > 1 else ONE
    found = machine("v5e", chips, {**GKE, **hosts, "TPU_ACCELERATOR_TYPE": f"v5litepod-{total}"}, None)
    assert settle_hosts(found) == (count - 1, PODS if count > 1 else ["localhost"])


def test_the_cells_of_the_page_give_options_that_there_are(tmp_path):
    commands = re.findall(r"^!\.venv/bin/python (\w+_mnist_tpu\.py .*)", PAGE, re.M)
    assert len(commands) == 3
    for command in commands:
        check_options(shlex.split(command), tmp_path)
