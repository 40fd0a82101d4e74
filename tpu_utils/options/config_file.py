"""config.json of a run directory: the options of the run that it holds."""

import json
import os
import re
from pathlib import Path
from typing import Any

from tpu_utils.base.errors import InputError
from tpu_utils.base.files import parse_object, read_json, write_atomically

OPTIONS = "the options of a run, as a training script wrote them; check --run_dir, or give all options with --preset"
MOST_BYTES = 1 << 20
"""Of config.json; the scripts' have one or two thousand."""


def names_a_place(run_dir: str) -> bool:
    """Whether it is a local folder or gs://BUCKET/FOLDER, and no other address."""
    folder_in_bucket = r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/(?!\.\.?(/|$))[\w.=+-]+)+/?"
    return not re.match(r"\w+:/", run_dir) or re.fullmatch(folder_in_bucket, run_dir) is not None


def read_config(run_dir: str) -> tuple[str, dict[str, Any] | None]:
    """(its name, what it holds) of the config.json of a folder or a gs:// directory; None where there is none.

    Raises InputError for one that is damaged.
    """
    name = f"{run_dir.rstrip('/')}/config.json"
    if run_dir.startswith("gs://"):
        from tpu_utils.remote.storage import read_object  # only here

        content = read_object(run_dir, "config.json", OPTIONS, MOST_BYTES)
        return name, None if content is None else parse_object(content, name, OPTIONS)
    return name, read_json(Path(name), OPTIONS, MOST_BYTES) if os.path.lexists(name) else None


def run_id_in(run_dir: Path) -> str:
    """The id of the run in a directory, which its checkpoints name too; "" for none, or if config.json is damaged."""
    try:
        run_id = read_json(run_dir / "config.json", "the options of a run").get("run_id")
    except InputError:
        return ""
    return run_id if isinstance(run_id, str) else ""


def write_config(run_dir: Path, run: dict[str, Any]) -> None:
    """config.json: from here on the directory holds a run."""
    write_atomically(run_dir / "config.json", json.dumps(run, indent=2).encode())
