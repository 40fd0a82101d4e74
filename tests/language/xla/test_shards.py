"""A process for each device, without torch_xla: what is refused.

What is computed: tests/scripts/test_torch_compile_backend.py.
"""

import pytest

from language.options.transformer_options import TransformerConfig
from language.xla.shards import check_torch_compile
from tpu_utils.base.errors import InputError

MIXTURE = dict(model_size="mixtral_tiny")


@pytest.mark.parametrize(
    "options, sizes, said",
    [
        (dict(scan_layers=True), (1, 1, 1, 1, 1), "scan_layers is True, which .* expected --no_scan_layers"),
        (dict(remat=True, remat_keep="residual"), (1, 1, 1, 1, 1), "remat_keep is residual, .* expected inputs"),
        (
            dict(sample_every=2, sample_prompts=("1",)),
            (2, 1, 1, 1, 1),
            "sample_every is 2, .* expected 0, or one device",
        ),
        (dict(mesh="1x2x2"), (1, 2, 2, 1, 1), "mesh is 1x2x2, .* expected DATAxFSDPx1"),
        (MIXTURE, (2, 1, 1, 1, 1), "number of experts is 8, .* expected a model without, or one device"),
    ],
)
def test_what_needs_torch_xla_is_refused(options, sizes, said):
    with pytest.raises(InputError, match=said):
        check_torch_compile(TransformerConfig(**options), sizes)


def test_what_one_device_or_data_and_fsdp_can_do_is_not():
    check_torch_compile(TransformerConfig(dropout=0.1, remat=True, optimizer="muon"), (2, 2, 1, 1, 1))
    check_torch_compile(TransformerConfig(**MIXTURE), (1, 1, 1, 1, 1))
