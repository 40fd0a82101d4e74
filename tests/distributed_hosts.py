"""One host of a simulated pod slice, without its devices; test_distributed.py starts several.

XLA's CPU client knows no other process (PJRT_LOCAL_PROCESS_COUNT, NUM_PROCESSES, a coordinator address: each process
still sees itself as process 0 of 1), so what runs here for real is all that happens between hosts outside XLA: finding
each other, agreeing, and reading disjoint parts of the data.

    TPU_SKIP_MDS_QUERY=1 TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost,localhost \
        python tests/distributed_hosts.py PORT SECONDS
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import DistributedMnistConfig
from images.arrays import TrainBatches
from images.mnist import load_dataset
from tpu_utils.base.errors import InputError, run_script
from tpu_utils.options.parsing import resolve
from tpu_utils.remote.hosts import settle_hosts
from tpu_utils.remote.meeting import wait_for_peers


def main() -> int:
    index, addresses = settle_hosts([])
    peers = wait_for_peers(index, addresses, seconds=float(sys.argv[2]), port=int(sys.argv[1]))

    def fails() -> None:
        raise InputError(f"raised by host {index}")

    try:
        peers.from_first(fails)
    except InputError as error:
        heard = str(error)
    config, _ = resolve(DistributedMnistConfig, "quick_test")
    batches = TrainBatches(load_dataset(config), config, peers.index, peers.count)
    found = {
        "index": peers.index,
        "count": peers.count,
        "from_first": peers.from_first(lambda: f"said by host {index}"),
        "error": heard,
        "largest": peers.largest(15 * index),
        "ids": [batches.ids(step).tolist() for step in range(30)],
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
