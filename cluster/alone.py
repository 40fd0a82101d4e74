"""A run without a cluster: Ray starts on this machine for it alone, listens on 127.0.0.1, and ends with it."""

import os
import secrets
import shutil
import tempfile

from cluster.driver import Driver, Spec

QUIET = {
    "RAY_AUTH_MODE": "token",  # this run's own; no other user of this machine has it
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's way to stay on 127.0.0.1; on Linux it would take every address
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
}


def run_alone(spec: Spec, variables: dict[str, str], chips_here: int) -> int:
    """Exit code of the run. chips_here: TPU chips of this machine; 0: as many virtual devices as it asks for."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]  # it belongs to another cluster
    os.environ |= QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    # a short path: sockets are made below it; a folder within, because Ray opens the one it gets to everybody
    place = tempfile.mkdtemp(prefix="tpu_ray_")
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=2,
            num_gpus=0,
            resources={"TPU": chips_here or spec.request["chips"]},
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=f"{place}/r",
        )
        return Driver(spec, variables).run()
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)
