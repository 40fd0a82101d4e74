"""What a step of a large model exchanges between the devices of a slice: counted in its plan."""

import json

from processes import run


def test_one_short_sequence_a_device_moves_no_activations():
    """The weights of a layer are larger there than its activations: left alone, the partitioner shards the MLP over its
    width, and exchanges that in float32. Qwen3 8B, 2,048 tokens a chip of v6e-8: a quarter of the step."""
    options = "--model_size qwen3_8B --num_layers 2 --sequence_length 2048 --global_batch_size 8 --mesh 1x8x1"
    options += " --dataset tokens --precision bfloat16 --attention flash --topology v6e-8 --plan --no_cache --json"
    done = run("aot_tpu.py", "transformer_tpu.py", *options.split())
    (report,) = json.loads(done.stdout)
    moved = report["collectives"]["all-to-all"]["bytes"]
    rows = 8 * 2048 * 4096 * 2 // 8  # of the embedding, bfloat16; their gradient is in float32, and it is updated
    assert rows <= moved < 8 * rows
