"""docs/fine_tuning.md: the commands for a downloaded model, as they stand, on a small one made here and a CPU."""

import json
import shlex

import pytest
from processes import ROOT, Script, run
from test_docs import blocks_of

TINY = ["--dataset=chat", "--model_size=llama_tiny", "--data_dir=DATA", "--train_data=chats.jsonl", "--num_steps=2"]
TINY += ["--warmup_steps=1", "--eval_batches=1", "--device=cpu", "--sequence_length=128", "--no_tensorboard"]
# a TPU's kernels, and lengths for which a test has no time
SHORTER = ["--device=cpu", "--attention=plain", "--sequence_length=128", "--num_steps=4", "--warmup_steps=1"]
SHORTER += ["--eval_batches=1", "--no_tensorboard"]


@pytest.mark.slow
def test_the_first_commands_train_ask_and_export_a_model(tmp_path):
    def ran(*words) -> str:
        process = Script(*words, folder=tmp_path)
        assert process.wait() == 0, process.text("err")
        return process.text("out")

    for path in (ROOT / name for name in ("transformer_tpu.py", "language", "tools", "tpu_utils")):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "DATA").mkdir()
    chat = json.dumps({"prompt": "Who are you?", "completion": "A small model."})
    (tmp_path / "DATA" / "chats.jsonl").write_text(f"{chat}\n" * 200)
    ran("transformer_tpu.py", *TINY, "--run_dir=runs/from_scratch")
    ran("-m", "tools.convert_hf", "export", "runs/from_scratch", "Qwen3-0.6B")
    done = []
    for command, _ in blocks_of(ROOT / "docs" / "fine_tuning.md")[0]:
        launcher, *words = shlex.split(command)
        if launcher.endswith("/hf") or "tools.evaluate" in words:  # a network; tests/tools/test_evaluate.py
            continue
        said = ran(*words, *(SHORTER if words[0] == "transformer_tpu.py" else []))
        done.append((words[1] if words[0] == "-m" else words[0], said))
    assert [name for name, _ in done] == ["transformer_tpu.py", "tools.generate", "tools.convert_hf"]
    assert "180 conversations to train on, 20 to validate, format plain" in done[0][1]
    assert (tmp_path / "exported" / "model.safetensors").exists()
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert "eos_token_id" in generation


@pytest.mark.parametrize(
    "preset, asked",
    [("finetune", "--device=cpu"), ("finetune", "--compile_for=v5litepod-1"), ("finetune_8B", "--compile_for=v6e-8")],
)
def test_the_preset_trains_no_other_model_in_silence(preset, asked):
    """Without a folder it would be the smallest GPT, of bytes and from scratch."""
    done = run("transformer_tpu.py", f"--preset={preset}", "--attention=plain", asked)
    assert done.returncode == 2 and "name a folder: --initial_weights" in done.stderr, done.stderr


@pytest.mark.slow
def test_the_preset_fits_a_v6e():
    """Qwen3 0.6B, by its config.json, as the page asks it, planned. Of a v5e it is in the budget (test_aot_tpu.py)."""
    question = ["--preset", "finetune", "--model_config", ROOT / "benchmarks" / "models" / "qwen3_0_6b.json"]
    done = run("aot_tpu.py", "transformer_tpu.py", *question, "--topology", "v6e-1", "--plan", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["fits"] and report["settings"]["preset"] == "finetune"
    assert report["settings"]["layers"] == 28 and 9 < report["peak_bytes"] / 2**30 < 13
    assert report["notes"] == ["layers 28, width 1024, vocabulary 151936, batch 8"]
