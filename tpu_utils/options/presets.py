"""What `python config.py` prints. Imported for that alone, and imports no torch."""

import argparse
import dataclasses
import importlib
import json
from collections.abc import Iterable
from importlib.util import find_spec

from tpu_utils.options.parsing import presets_of, resolve


def print_presets(kinds: Iterable[str]) -> int:
    """The command line of config.py. kinds: MODULE:CLASS of each configuration; a module that is not there, as in a
    copy of another script, is left out. Raises InputError for a preset that cannot work."""
    parser = argparse.ArgumentParser(description="Print every preset, resolved: each value and where it came from.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given, everything = parser.parse_args(), {}
    for module, kind in (name.split(":") for name in kinds):
        if not (find_spec(module.partition(".")[0]) and find_spec(module)):
            continue
        for preset in presets_of(found := getattr(importlib.import_module(module), kind)):
            config, sources = resolve(found, preset)
            rows = {name: {"value": v, "source": sources[name]} for name, v in dataclasses.asdict(config).items()}
            everything.setdefault(kind, {})[preset] = rows
            if not given.json:
                print(f"{kind} --preset {preset}: valid")
                for name, row in rows.items():
                    source = "" if row["source"] == "default" else row["source"]
                    print(f"  {name:28} {row['value']!s:28} {source}".rstrip())
                print()
    if given.json:
        print(json.dumps(everything, indent=2))
    return 0
