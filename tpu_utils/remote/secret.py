"""The secret of a slice: by it the hosts of a run know each other. Imports no torch."""

import os
import shlex
from pathlib import Path

from tpu_utils.base.errors import DeviceError, InputError
from tpu_utils.base.files import open_regular
from tpu_utils.remote.hosts import KNOWN_SECONDS, ask_server

SECRET_ATTRIBUTE = "peers-secret"
"""Attribute of the VM's metadata: gcloud compute tpus tpu-vm create ... --metadata-from-file peers-secret=FILE."""


def read_secret(file: str) -> bytes:
    """The secret in this file, or where there is none the attribute peers-secret of the VM's metadata, or nothing.

    Raises InputError for a file that others may read, or with fewer than 16 bytes.
    """
    if not file:
        return _secret_in_metadata()
    try:
        with open_regular(Path(file), "a secret") as opened:
            mode, secret = os.fstat(opened.fileno()).st_mode & 0o777, opened.read(4096).strip()
    except (OSError, ValueError) as error:
        raise InputError(f"peers_secret {file} cannot be read: {error}") from error
    if mode & 0o077:
        raise InputError(f"peers_secret {file} has mode {mode:o}, so others may read it; chmod 600 {shlex.quote(file)}")
    return _long_enough(secret, f"peers_secret {file}")


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < 16:
        raise InputError(f"{where} holds {len(secret)} bytes, expected at least 16; openssl rand -hex 32 > FILE")
    return secret


def _secret_in_metadata() -> bytes:
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        return b""
    reply = ask_server(f"attributes/{SECRET_ATTRIBUTE}", KNOWN_SECONDS)
    if reply.code == 404:  # the slice was made without one
        return b""
    if reply.code != 200:  # without the others' secret it could not meet them
        raise DeviceError(f"the metadata server {reply.why} to {SECRET_ATTRIBUTE}; start again on a TPU VM")
    return _long_enough(reply.value[:4096].strip(), f"{SECRET_ATTRIBUTE} of the VM's metadata")
