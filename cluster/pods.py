"""A JobSet and a RayCluster on TPU hosts of GKE, as the values of their YAML.

Each field is in the definitions of jobset.x-k8s.io/v1alpha2 and ray.io/v1: tests/cluster_schemas.json beside this.
"""

from cluster.quoting import for_kubernetes
from cluster.request import Request

RAY = "2.60.0"
"""As in cluster/requirements.txt: who submits a run and who takes it must be of one version."""
GRACE_SECONDS = 120
"""Time for a stop: the rest of a step, the save and its upload must fit into it."""
RESTARTS = 20


def account(request: Request) -> dict:
    return {"serviceAccountName": request.service_account} if request.service_account else {}


def tpu_pod(request: Request, container: dict) -> dict:
    """The fields of a pod that uses all chips of one host: privilege to open them, request for them, node selector."""
    chips = {"google.com/tpu": request.found.chips_per_host}
    return {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        **account(request),
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": request.found.rented.label,
            "cloud.google.com/gke-tpu-topology": request.found.shape,
            **({"cloud.google.com/gke-spot": "true"} if request.spot else {}),
        },
        "containers": [
            {
                **container,
                "image": request.image,
                "securityContext": {"privileged": True, "runAsUser": 0},
                "resources": {"requests": chips, "limits": chips},
            }
        ],
    }


def jobset_content(request: Request) -> dict:
    """jobset.x-k8s.io/v1alpha2. All hosts start again when one fails; wrong input (exit code 2) ends it."""
    hosts = request.found.hosts
    by_pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    wrong_input = {"containerName": "train", "operator": "In", "values": [2]}
    container = {"name": "train", "command": [for_kubernetes(word) for word in ("python", *request.words)]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": request.name, **({"annotations": by_pool} if hosts > 1 else {})},
        "spec": {
            "failurePolicy": {
                "maxRestarts": RESTARTS,
                "rules": [
                    {"name": "wrong-input", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [
                {
                    "name": "slice",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": hosts,
                            "completions": hosts,
                            "backoffLimit": 0,
                            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong_input}]},
                            "template": {"spec": {"restartPolicy": "Never", **tpu_pod(request, container)}},
                        }
                    },
                }
            ],
        },
    }


def raycluster_content(request: Request) -> dict:
    """ray.io/v1. Runs take turns on num_slices slices; nothing but drivers runs on the head."""
    head = {
        "name": "ray-head",
        "image": request.image,
        "ports": [
            {"containerPort": 6379, "name": "gcs-server"},
            {"containerPort": 8265, "name": "dashboard"},
            {"containerPort": 10001, "name": "client"},
        ],
        "resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"cpu": "2", "memory": "8Gi"}},
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": request.name},
        "spec": {
            "rayVersion": RAY,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0"},
                "template": {"spec": {**account(request), "containers": [head]}},
            },
            "workerGroupSpecs": [
                {
                    "groupName": "slice",
                    "numOfHosts": request.found.hosts,
                    "replicas": request.num_slices,
                    "minReplicas": request.num_slices,
                    "maxReplicas": request.num_slices,
                    "rayStartParams": {"block": "true"},
                    "template": {"spec": tpu_pod(request, {"name": "ray-worker"})},
                }
            ],
        },
    }
