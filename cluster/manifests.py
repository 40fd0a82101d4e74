"""Print what creates a TPU slice, installs this project, runs a script on all its
hosts, watches it and deletes everything. Nothing is run.

Run:     python -m cluster print queued-resource --slice v5litepod-16 \\
             --zone us-west4-a -- transformer_tpu.py --preset distributed
             gcloud and ssh, no container
         python -m cluster print xpk --slice v5litepod-16 \\
             --zone us-west4-a --image IMAGE -- SCRIPT ARGUMENTS
             a GKE cluster with a queue, made and used by xpk
         python -m cluster print jobset ...
             a GKE cluster, and a JobSet for kubectl
         python -m cluster print kuberay ...
             a GKE cluster with Ray on it, for `python -m cluster run --address`
Exit:    0 printed; 2 what was asked for does not fit together.

The text is bash: comments, commands, and the YAML as a file that a command
writes. Run it piece by piece; what it creates is paid for until its last piece.
"""

import shlex
import sys

from cluster.pods import GRACE_SECONDS, RAY, RESTARTS, jobset_content, raycluster_content
from cluster.quoting import for_kubernetes, shell_line, shell_word, yaml_text
from cluster.request import TRAINING, Request, read_request
from tpu_utils.base.errors import run_script

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml"


def main(arguments: list[str]) -> int:
    return run_script(lambda: print_request(arguments), answers=True)


def print_request(arguments: list[str]) -> int:
    request = read_request(arguments, __doc__)
    pieces = PRINTERS[request.kind](request)
    lines = [
        f"# {request.found}; zone {request.zone}",
        f"# Printed by python -m cluster print {request.kind}, not run. Run it piece by piece: it costs money until",
        f"# piece {len(pieces)} is done. cluster/slices.md says what was checked.",
        *(f"# warning: {warning}" for warning in request.warnings),
    ]
    for number, (title, commands) in enumerate(pieces.items(), 1):
        lines += ["", f"# {number}. {title}", *commands]
    sys.stdout.reconfigure(encoding="utf-8")  # a word is printed as it was given, whatever the terminal is set to
    print("\n".join(lines))
    for warning in request.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


Pieces = dict[str, list[str]]
"""Title: lines of bash."""


def command(*parts: str | list[str]) -> str:
    """One command, a line for each part. A part that is a list is quoted, a text stands as it is."""
    return " \\\n    ".join(shell_line(part) if isinstance(part, list) else part for part in parts if part)


# ------------------------------------------------------------------------------------------------ gcloud and ssh


def queued_resource(request: Request) -> Pieces:
    """As docs/tpu_vm.md, which says more of each command."""
    name, found = request.name, request.found
    several = request.num_slices > 1
    slices = [f"{name}-{number}" for number in range(request.num_slices)] if several else [name]
    version = request.runtime_version or found.rented.version
    loop = f"for slice in {shell_line(slices)}; do"

    def ssh(where: str, workers: str, remote: str) -> str:
        said = shlex.quote(remote)
        return command(f"gcloud compute tpus tpu-vm ssh {where}", [*request.in_zone, workers], f"--command={said}")

    def on_all(workers: str, remote: str) -> list[str]:
        return [loop, ssh('"$slice"', workers, remote), "done"] if several else [ssh(name, workers, remote)]

    setup = f"""
    set -e
    sudo apt-get -o DPkg::Lock::Timeout=600 update
    sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.11-venv libpython3.11
    git -C tpu-examples pull --ff-only || git clone {shlex.quote(request.git_url)} tpu-examples
    cd tpu-examples
    python3.11 -m venv .venv
    .venv/bin/pip install -q -r requirements.txt"""
    log, script = f"{name}.log", request.words[0]
    run = f"cd tpu-examples && {{ nohup .venv/bin/python {shell_line(request.words)} > {log} 2>&1 < /dev/null & }}"
    doctor = "cd tpu-examples && .venv/bin/python setup_tpu.py --device tpu"
    queue = "gcloud compute tpus queued-resources"
    agent = 'eval "$(ssh-agent -s)" && ssh-add ~/.ssh/google_compute_engine'
    fill_in = ["# GIT_URL: the address of this repository; --git_url fills it in"]
    return {
        "create": [
            command(
                f"{queue} create {name}",
                ["--node-count", str(request.num_slices), "--node-prefix", name] if several else ["--node-id", name],
                ["--accelerator-type", found.accelerator_type, "--runtime-version", version],
                ["--service-account", request.service_account] if request.service_account else "",
                ["--scopes", SCOPE, *request.in_zone, *(["--spot"] if request.spot else [])],
            ),
            command(f"{queue} describe {name}", [*request.in_zone, "--format", "value(state.state)"])
            + "  # until ACTIVE",
        ],
        "install on all hosts": [
            ssh(slices[0], "--worker=0", "true") + "  # the first one makes your key",
            *([agent] if found.hosts > 1 else []),
            *(fill_in if request.git_url == "GIT_URL" else []),
            *on_all("--worker=all", setup),
            *on_all("--worker=all", doctor),
        ],
        "run the script on all hosts" + (" of the first slice: a run uses one" if several else ""): [
            ssh(slices[0], "--worker=all", run),
        ],
        "watch host 0; the second command makes it save and stop": [
            ssh(slices[0], "--worker=0", f"tail -n 40 -f tpu-examples/{log}"),
            ssh(slices[0], "--worker=all", f"pkill -f '[{script[0]}]{script[1:]}'"),
        ],
        "delete": [command(f"{queue} delete {name}", [*request.in_zone, "--force"])],
    }


# ------------------------------------------------------------------------------------------------ GKE


def image(request: Request, *layers: str) -> list[str]:
    """The Dockerfile's image with more lines, and its push."""
    name = shell_word(request.image)
    named = f"docker tag tpu-examples {name}"
    if layers:
        named = shell_line(["printf", r"%s\n", "FROM tpu-examples", *layers]) + f" | docker build -t {name} -"
    return ["docker build -t tpu-examples .", named, f"docker push {name}"]


def xpk(request: Request) -> Pieces:
    """xpk writes the JobSet, its Python a literal block of YAML: a word with a line break would end it."""
    kind, cluster = ["--tpu-type", request.found.xpk_type], ["--cluster", request.cluster, *request.in_zone]
    alone = ["--no-use-parallel-containers"] if request.found.topology.hardware.devices_per_chip > 1 else ""
    line = for_kubernetes("exec python " + shell_line(request.words))
    return {
        "the image, which xpk runs as the image's user: root opens the TPU": image(request, "USER root"),
        "create (xpk 1.16 by pip; it uses gcloud and kubectl)": [
            command(
                shell_line(["xpk", "cluster", "create", *cluster]),
                [*kind, "--num-slices", str(request.num_slices), "--spot" if request.spot else "--on-demand"],
            )
        ],
        "run the script on all hosts of one slice": [
            command(
                shell_line(["xpk", "workload", "create", "--workload", request.name, *cluster]),
                [*kind, "--num-slices", "1", "--docker-image", request.image],
                alone,
                ["--max-restarts", str(RESTARTS), "--restart-on-exit-codes", "1"],
                ["--termination-grace-period-seconds", str(GRACE_SECONDS)],
                f"--command={shlex.quote(line)}",
            )
        ],
        "watch": [shell_line(["xpk", "workload", "list", *cluster]), *logs(request)],
        "delete": [
            shell_line(["xpk", "workload", "delete", "--workload", request.name, *cluster]),
            shell_line(["xpk", "cluster", "delete", *cluster]),
        ],
    }


def logs(request: Request) -> list[str]:
    chosen = f"jobset.sigs.k8s.io/jobset-name={request.name},batch.kubernetes.io/job-completion-index=0"
    return [shell_line(["kubectl", "logs", "--follow", "--tail", "40", "--selector", chosen]) + "  # host 0"]


def write(file: str, content: dict) -> str:
    return f"cat > {file} <<'END_OF_YAML'\n{yaml_text(content)}\nEND_OF_YAML"


def in_cluster(request: Request) -> list[str]:
    return ["--location", request.region, *request.in_project]


def node_pools(request: Request) -> list[str]:
    """A slice of several hosts is a node pool of its own; slices of one host are the nodes of one pool."""
    return [f"{request.name}-{n}" for n in range(request.num_slices if request.found.hosts > 1 else 1)]


def needs_policy(request: Request) -> bool:
    """TPU7x: a workload policy has the topology, not the node pool (xpk 1.16.0, core/nodepool.py)."""
    return request.found.hosts > 1 and request.found.topology.generation == "TPU7x"


def create_on_gke(request: Request, *addons: str) -> list[str]:
    found, identity = request.found, bool(request.service_account)
    nodes = found.hosts if found.hosts > 1 else request.num_slices
    where = ["--cluster", request.cluster, *in_cluster(request), "--node-locations", request.zone]
    topology = ["--tpu-topology", found.shape] if found.hosts > 1 else ""
    policy = []
    if needs_policy(request):
        topology = ["--placement-policy", request.name]
        policy = [
            command(
                f"gcloud compute resource-policies create workload-policy {request.name}",
                ["--type", "HIGH_THROUGHPUT", "--accelerator-topology", found.shape],
                ["--region", request.region, *request.in_project],
            )
        ]
    return [
        command(
            f"gcloud container clusters create {request.cluster}",
            [*in_cluster(request), "--node-locations", request.zone],
            ["--num-nodes", "1", "--machine-type", "e2-standard-8"],
            [*addons, *(["--workload-pool", f"{request.project}.svc.id.goog"] if identity else [])],
        ),
        shell_line(["gcloud", "container", "clusters", "get-credentials", request.cluster, *in_cluster(request)]),
        *policy,
        *(
            command(
                f"gcloud container node-pools create {pool}",
                where,
                ["--machine-type", found.machine, "--num-nodes", str(nodes)],
                topology,
                ["--scopes", SCOPE, *(["--spot"] if request.spot else [])],
                ["--workload-metadata", "GKE_METADATA"] if identity else "",
            )
            for pool in node_pools(request)
        ),
    ]


def delete_on_gke(request: Request) -> list[str]:
    where, gone = ["--cluster", request.cluster, *in_cluster(request)], ["gcloud", "container"]
    policy = ["gcloud", "compute", "resource-policies", "delete", request.name, "--region", request.region]
    return [
        *(shell_line([*gone, "node-pools", "delete", pool, *where]) for pool in node_pools(request)),
        *([shell_line([*policy, *request.in_project])] if needs_policy(request) else []),
        shell_line([*gone, "clusters", "delete", request.cluster, *in_cluster(request)])
        + "  # and all that others run on it",
    ]


def jobset(request: Request) -> Pieces:
    file = f"{request.name}.yaml"
    return {
        "the image": image(request),
        "create": [*create_on_gke(request), shell_line(["kubectl", "apply", "--server-side", "-f", JOBSET])],
        "run the script on all hosts of one slice": [write(file, jobset_content(request)), f"kubectl apply -f {file}"],
        "watch": [f"kubectl get jobset {request.name}", *logs(request)],
        "delete": [f"kubectl delete jobset {request.name}", *delete_on_gke(request)],
    }


def kuberay(request: Request) -> Pieces:
    name, file = request.name, f"{request.name}.yaml"
    token = f"kubectl get secret {name} -o jsonpath='{{.data.auth_token}}' | base64 -d"
    cluster = "python -m cluster"
    at = "export RAY_ADDRESS=http://127.0.0.1:8265"
    script, *words = request.words
    plain = ["--plain"] if script not in TRAINING else []  # not one that takes --run_dir and --resume
    storage = ["--storage", "gs://BUCKET/runs"] if not plain and request.value_of("run_dir") is None else []
    run = [*cluster.split(), "run", script, "--slice", request.found.accelerator_type, "--name", name]
    return {
        "the image, with Ray": image(request, "USER root", f'RUN pip install --no-cache-dir "ray[default]=={RAY}"'),
        "create (the add-on is KubeRay's operator, and the webhook that numbers the hosts of a slice)": [
            *create_on_gke(request, "--addons", "RayOperator"),
            write(file, raycluster_content(request)),
            f"kubectl apply -f {file}",
            f"kubectl wait raycluster/{name} --for condition=RayClusterProvisioned --timeout 30m",
        ],
        "run the script on all hosts of one slice; others use the same cluster with these three lines": [
            f"kubectl port-forward service/{name}-head-svc 8265:8265 > port-forward.log &",
            f'{at} RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$({token})"',
            *(["# BUCKET: yours; the run is kept in runs/NAME of it"] if storage else []),
            shell_line([*run, *storage, *plain, "--detach", "--", *words]),
        ],
        "watch": [f"{cluster} top", f"{cluster} logs -f {name}"],
        "delete": [f"kubectl delete raycluster {name}", *delete_on_gke(request)],
    }


PRINTERS = {"queued-resource": queued_resource, "xpk": xpk, "jobset": jobset, "kuberay": kuberay}
