"""Which hosts a TPU slice has, which of them this is, and the secret by which they know each other. Imports no torch.

A TPU VM's metadata says it. GKE, Colab and Kaggle have no such metadata and say it, or a part of it, in variables of
the environment. torch_xla asks again: at its import, where chips are attached, for the accelerator type (__init__.py,
_setup_libtpu_flags), and with a process for each chip for the topology (_internal/tpu.py, configure_topology). It
raises HTTPError, ConnectionError, TypeError or AttributeError where the answer is missing.
"""

import http.client
import os
import re
import shlex
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from tpu_utils.base.errors import DeviceError, InputError
from tpu_utils.base.files import open_regular
from tpu_utils.base.hardware import Generation

SILENT_SECONDS = 2.0
"""A metadata server that has not answered by then is taken for none, where this host is a slice by itself."""
KNOWN_SECONDS = 20.0
"""Time limit of the server elsewhere, and after its first answer: without it the other hosts are unknown."""
TYPE = r"(v|tpu)\d[A-Za-z]{0,7}-\d+"
"""Accelerator types that torch_xla can read (_internal/tpu.py, version). They end in the number of chips or cores."""

SECRET_ATTRIBUTE = "peers-secret"
"""Attribute of the VM's metadata: gcloud compute tpus tpu-vm create ... --metadata-from-file peers-secret=FILE."""


class Said(NamedTuple):
    """What one source says: this host's index, the hosts' addresses, the accelerator type; None: nothing."""

    index: int | None
    addresses: list[str] | None
    kind: str | None


def settle_hosts(chips: list[Generation], environment: MutableMapping[str, str] = os.environ) -> tuple[int, list[str]]:
    """(index of this host, addresses of all hosts of its slice). A host that is told of no others is alone. chips:
    attached to this host. Without metadata, this sets the environment variables that torch_xla and libtpu read in its
    place. Raises InputError for contradictions, DeviceError where a TPU VM's metadata server fails."""
    said, names = in_environment(environment), ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
    # hosts of a larger slice have 4 chips each, of any generation; with others a host is a slice by itself
    alone = said.addresses is not None or len(chips) != 4
    unknown = chips and not alone and not said.kind and not said.index
    if environment.get("TPU_SKIP_MDS_QUERY") and unknown:
        raise InputError(
            f"TPU_SKIP_MDS_QUERY is set, but nothing says whether this host with {len(chips)} chips is one of several; "
            "unset it on a TPU VM; where this is the only host set TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost"
        )
    metadata = None if environment.get("TPU_SKIP_MDS_QUERY") else in_metadata(alone)
    if metadata:
        for name, found, expected in zip(names, said, metadata, strict=True):
            same = len(found) == len(expected) if isinstance(found, list) else found == expected  # names or addresses
            if found is not None and expected is not None and not same:
                raise InputError(
                    f"{name} is {environment[name]}, but the VM's metadata says {expected}; unset {name}, or set "
                    "TPU_SKIP_MDS_QUERY=1 where the environment is right"
                )
    index, addresses, kind = metadata or said
    addresses = addresses or ["localhost"]
    source = "the VM's metadata" if metadata else "TPU_WORKER_HOSTNAMES"
    if index is None and len(addresses) > 1:
        raise InputError(
            f"{source} names {len(addresses)} hosts, but nothing says which of them this is; set TPU_WORKER_ID to its "
            f"position, 0 to {len(addresses) - 1}"
        )
    index = index or 0
    if not 0 <= index < len(addresses):
        raise InputError(
            f"this host has index {index}, but {source} names {len(addresses)}, expected an index from 0 to "
            f"{len(addresses) - 1}; name all hosts in TPU_WORKER_HOSTNAMES, or set TPU_WORKER_ID to the position in it"
        )
    check_type(kind, chips, len(addresses), environment)
    if not metadata:
        if said.addresses is None and environment.get("LOCAL_RANK", "0") == "0":
            print("host       0 of 1: neither the environment nor a metadata server names others", flush=True)
        for name, value in zip(names, (str(index), ",".join(addresses), kind), strict=True):
            set_missing(environment, name, value)
        fill_in(chips, len(addresses), environment)
    return index, addresses


def in_environment(environment: Mapping[str, str]) -> Said:
    """Raises InputError for values that cannot be right."""
    index = environment.get("TPU_WORKER_ID")
    if not index and environment.get("TPU_SKIP_MDS_QUERY"):  # then torch_xla reads it; else torch_xla sets it
        index = environment.get("CLOUD_TPU_TASK_ID")
    if index and not index.isdecimal():
        raise InputError(f"TPU_WORKER_ID is {index!r}, expected this host's index, from 0 on; set it, or unset it")
    names = environment.get("TPU_WORKER_HOSTNAMES")
    addresses = [name.strip() for name in names.split(",")] if names else None
    if addresses and not all(re.fullmatch(r"[\w.:-]+", address, re.ASCII) for address in addresses):
        raise InputError(
            f"TPU_WORKER_HOSTNAMES is {names!r}, expected names or addresses of hosts with commas between; set it, or "
            "unset it where there is one host"
        )
    return Said(int(index) if index else None, addresses, environment.get("TPU_ACCELERATOR_TYPE") or None)


def in_metadata(alone: bool) -> Said | None:
    """None where there is no metadata server, or it knows of no TPU slice: 404, as on Colab and Kaggle."""
    tpu_env = ask_metadata("tpu-env", alone)
    if tpu_env is None:
        return None
    found = (re.search(rf"^{name}:\s*'?([^'\n]*)", tpu_env, re.MULTILINE) for name in ("WORKER_ID", "ACCELERATOR_TYPE"))
    index, kind = (match and match[1].strip() for match in found)
    endpoints = ask_metadata("worker-network-endpoints", False)
    try:
        addresses = [worker.split(":")[2] for worker in endpoints.strip().split(",")]  # name:id:address,...
        return Said(int(index) if index else None, addresses if len(addresses) > 1 else ["localhost"], kind)
    except (AttributeError, IndexError, ValueError) as error:
        raise DeviceError(
            f"the VM's metadata has WORKER_ID {index!r} in tpu-env and worker-network-endpoints {endpoints!r}, "
            "expected a number and name:id:address of each host; start again"
        ) from error


class Reply(NamedTuple):
    """The metadata server's answer to one request."""

    code: int  # HTTP status; 0: there was no answer
    value: bytes
    why: str  # in words, where code is not 200
    nobody: bool = False
    """Certainly no metadata server: the connection failed, or it is another server. A timeout does not prove it."""
    etag: str = "0"  # names this value: asked with it, the server waits until there is another


def ask_server(key: str, seconds: float) -> Reply:
    """A page below instance/. By the server's address: looking up a name has no timeout of its own."""
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"  # metadata.google.internal
    link, there = http.client.HTTPConnection(host, timeout=SILENT_SECONDS), False  # it knows no proxies
    try:
        link.connect()
        there = True
        link.sock.settimeout(seconds)
        link.request("GET", f"/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"})
        answer = link.getresponse()
        google, value = answer.headers.get("Metadata-Flavor") == "Google", answer.read(2**20)
        if answer.status == 200 and not google:  # a portal's page
            return Reply(0, b"", "is not Google's, which answers", nobody=True)
        return Reply(answer.status, value, f"answers {answer.status}", etag=answer.headers.get("ETag", "0"))
    except (OSError, http.client.HTTPException) as error:
        # refused, no route, no such name: no server. A timeout, or an error after connecting: it may only be slow
        nobody = not there and not isinstance(error, TimeoutError)
        return Reply(0, b"", f"does not answer ({error or type(error).__name__})", nobody)
    finally:
        link.close()


def ask_metadata(key: str, alone: bool) -> str | None:
    """An attribute of the VM, or None: there is no such attribute (404), or no such server. alone: silence too means
    that there is none. Else, and for a server that fails, raises DeviceError."""
    reply = ask_server(f"attributes/{key}", SILENT_SECONDS if alone else KNOWN_SECONDS)
    if reply.code == 200:
        return reply.value.decode(errors="replace")
    if reply.nobody or reply.code == 404 or (alone and reply.code < 429):
        return None
    raise DeviceError(
        f"the metadata server {reply.why} to {key}, and nothing else says whether this host is one of several; start "
        "again, or where it is the only one set TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=localhost"
    )


def family(chip: Generation) -> tuple[str, int]:
    """(how its accelerator types begin, what they count of each chip): v5litepod-8 has 8 chips, v4-8 and tpu7x-8 4."""
    name = {"v5e": "v5litepod", "TPU7x": "tpu7x"}.get(chip.name, chip.name)
    return name, max(chip.cores_in_name, chip.devices_per_chip)


def chips_in(kind: str, chip: Generation) -> int:
    """Chips of a whole slice; 0 for a type that is not named after these chips, which proves nothing."""
    name, number = kind.rsplit("-", 1)
    return int(number) // family(chip)[1] if name in (family(chip)[0], chip.name) else 0


def check_type(kind: str | None, chips: list[Generation], hosts: int, environment: Mapping[str, str]) -> None:
    """Raises InputError where the accelerator type cannot be read, or needs more chips than these hosts have. Fewer may
    be right: a container sees all chips of its machine on the PCI bus, and may have been given some of them."""
    if kind and not re.fullmatch(TYPE, kind):
        raise InputError(
            f"the accelerator type is {kind!r}, expected one such as v5litepod-8, v6e-8, v4-8, v5p-8; set "
            "TPU_ACCELERATOR_TYPE, or unset it"
        )
    divided = environment.get("TPU_VISIBLE_CHIPS") or environment.get("TPU_PROCESS_BOUNDS")  # divided on purpose
    if kind and chips and not divided and len(chips) * hosts < chips_in(kind, chips[0]):
        raise InputError(
            f"accelerator type {kind} has {chips_in(kind, chips[0])} chips, but this is 1 of {hosts} hosts with "
            f"{len(chips)} chips each; name all hosts in TPU_WORKER_HOSTNAMES, or correct TPU_ACCELERATOR_TYPE; a VM "
            "that has lost a chip must be made anew"
        )


def set_missing(environment: MutableMapping[str, str], name: str, value: str | None) -> None:
    if value and not environment.get(name):
        environment[name] = value


def fill_in(chips: list[Generation], hosts: int, environment: MutableMapping[str, str]) -> None:
    """Set the other variables that torch_xla reads without metadata (_internal/tpu.py, build_tpu_env_from_vars)."""
    set_missing(environment, "TPU_SKIP_MDS_QUERY", "1")
    if not chips:
        return
    name, each = family(chips[0])
    set_missing(environment, "TPU_ACCELERATOR_TYPE", f"{name}-{len(chips) * hosts * each}")
    bounds = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}.get(chips_in(environment["TPU_ACCELERATOR_TYPE"], chips[0]))
    if hosts == 1 and bounds and not environment.get("TPU_HOST_BOUNDS"):
        environment["TPU_HOST_BOUNDS"] = "1,1,1"
        set_missing(environment, "TPU_CHIPS_PER_HOST_BOUNDS", bounds)


def read_secret(file: str) -> bytes:
    """The secret in this file, or where there is none the attribute peers-secret of the VM's metadata, or nothing.
    Raises InputError for a file that others may read, or with fewer than 16 bytes."""
    if file:
        where = f"peers_secret {file}"
        try:
            with open_regular(Path(file), "a secret") as opened:
                mode, secret = os.fstat(opened.fileno()).st_mode & 0o777, opened.read(4096).strip()
        except (OSError, ValueError) as error:
            raise InputError(f"{where} cannot be read: {error}") from error
        if mode & 0o077:
            raise InputError(f"{where} has mode {mode:o}, so others may read it; chmod 600 {shlex.quote(file)}")
    else:
        where = f"{SECRET_ATTRIBUTE} of the VM's metadata"
        if os.environ.get("TPU_SKIP_MDS_QUERY"):
            return b""
        reply = ask_server(f"attributes/{SECRET_ATTRIBUTE}", KNOWN_SECONDS)
        if reply.code == 404:  # the slice was made without one
            return b""
        if reply.code != 200:  # without the others' secret it could not meet them
            raise DeviceError(f"the metadata server {reply.why} to {SECRET_ATTRIBUTE}; start again on a TPU VM")
        secret = reply.value[:4096].strip()
    if len(secret) < 16:
        raise InputError(f"{where} holds {len(secret)} bytes, expected at least 16; openssl rand -hex 32 > FILE")
    return secret
