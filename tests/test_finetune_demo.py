"""benchmarks/finetune_demo.py: its chats and its judgement; the whole of it, slow."""

import json
import re
import subprocess
import sys

import pytest
from processes import ROOT

from benchmarks import finetune_demo
from chat_data import read_chats

TEXT = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"


def test_held_out_words_stand_in_no_training_question(tmp_path):
    text = " ".join(f"{chr(97 + i)}{chr(97 + j)}{chr(97 + k)}" for i in range(9) for j in range(9) for k in range(9))
    training, held_out = finetune_demo.words_of(text + " Rome don't", seed=0)
    assert len(held_out) == 200 and len(training) == 529 and not {*training} & {*held_out}
    finetune_demo.write_chats(tmp_path / "x.jsonl", training, seed=1)
    content = (tmp_path / "x.jsonl").read_text()
    assert len(read_chats(tmp_path / "x.jsonl")) == 4 * 529
    assert set(re.findall(r"(?:Spell|Say|is|Reverse) ([a-z]+)", content)) == {*training}
    finetune_demo.write_chats(tmp_path / "y.jsonl", training, seed=1)
    assert (tmp_path / "y.jsonl").read_text() == content


def test_a_right_answer_has_the_format_and_rambling_has_not():
    for _, _, right, form in finetune_demo.TASKS:
        for word in ("ask", "crowned"):
            assert re.fullmatch(form, right(word))
            assert not re.fullmatch(form, right(word) + "\nUser: Spell it.")
            assert not re.fullmatch(form, word + ", my lord")


@pytest.mark.slow
def test_the_fine_tune_works(tmp_path):
    if not TEXT.exists():
        pytest.skip("the real text is not beside this checkout (../shared/data)")
    command = [sys.executable, "benchmarks/finetune_demo.py", TEXT, "--work", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "finetuned.json").read_text())
    assert not any(row[3] for row in found["before"])
    assert all(row[3] for row in found["finetuned"])
    assert sum(row[4] for row in found["finetuned"]) >= 50  # of 100
