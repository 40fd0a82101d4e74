"""transformer_tpu.py as one of several hosts that each have all devices: what they agree on, without a TPU.

XLA's CPU client knows no other process (with PJRT_LOCAL_PROCESS_COUNT or a coordinator's address each still sees itself
as process 0 of 1), so every host computes the whole batch, on the devices of all; meeting, agreeing and who writes what
are real.

    python tests/transformer_hosts.py INDEX COUNT PORT [--devices_per_host=N] OPTIONS...

tools.keep_running --elastic tells by TPU_WORKER_ID and TPU_WORKER_HOSTNAMES of fewer hosts than COUNT.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformer_tpu
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import run_script
from tpu_utils.options.parsing import parse_command_line
from tpu_utils.remote.meeting import wait_for_peers


def main() -> int:
    index, count, port = map(int, sys.argv[1:4])
    addresses = ["localhost"] * count
    if names := os.environ.get("TPU_WORKER_HOSTNAMES"):
        index, addresses = int(os.environ["TPU_WORKER_ID"]), names.split(",")
    options = sys.argv[4:]
    if options[0].startswith("--devices_per_host="):
        os.environ["CPU_NUM_DEVICES"] = str(len(addresses) * int(options.pop(0).partition("=")[2]))
    peers = wait_for_peers(index, addresses, 600, port)
    return transformer_tpu.train(parse_command_line(TransformerConfig, "", options), peers)


if __name__ == "__main__":
    sys.exit(run_script(main))
