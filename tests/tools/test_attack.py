"""benchmarks/attack.py: it sees what gets in, and a short form of it finds nothing."""

import json

import pytest
from processes import run

from benchmarks import attack
from tpu_utils.checkpoint import saved


def test_a_hole_is_seen(monkeypatch, capsys):
    """A marker that is believed whatever folder it stands in."""
    monkeypatch.setattr(saved, "read_marker", lambda folder: json.loads((folder / "done").read_bytes()))
    assert attack.one("folders", 40, 0) == 1
    assert "swapped folders were resumed from" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_short_attack_finds_nothing():
    done = run("benchmarks/attack.py", "--share", "0.05", timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert rows == list(attack.ATTACKS)
