"""benchmarks/finetune_demo.py: its chats and its judgement."""

import re

from benchmarks import finetune_demo
from language.data.chat import read_chats


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
