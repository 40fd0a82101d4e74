"""llm.c's files: what is said of a vocabulary that is not the model's."""

import numpy as np
import pytest

from language.data.llmc_files import open_token_shard, write_token_shard
from tpu_utils.base.errors import InputError


@pytest.mark.parametrize(
    "recorded, expected",
    [(316, r"resize_token_embeddings\(316\), then save_pretrained"), (257, "tools.prepare_data --tokenizer FOLDER")],
)
def test_a_shard_of_another_vocabulary_leads_somewhere(tmp_path, recorded, expected):
    """A model that has its weights takes no other --vocab_size, and its own tokenizer may have got more tokens."""
    write_token_shard(tmp_path / "a.bin", np.arange(200, dtype=np.uint16), recorded)
    with pytest.raises(InputError, match=f"for a new model use --vocab_size {recorded}; for one of --init.*{expected}"):
        open_token_shard(tmp_path / "a.bin", 300)
