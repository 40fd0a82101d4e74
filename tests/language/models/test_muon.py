"""muon.py: what is made orthogonal, and that one update of many matrices is the update of each."""

import pytest
import torch
from test_transformer_tpu import plain_muon

from language.build import build_optimizer
from language.models.layers import is_matrix
from language.models.llama import Llama
from language.models.muon import orthogonalised
from language.options.transformer_options import TransformerConfig
from tpu_utils.base.errors import InputError
from tpu_utils.step.optim import make_optimizer


@pytest.mark.parametrize(("dtype", "ends"), [(torch.float32, (0.67, 1.14)), (torch.bfloat16, (0.66, 1.15))])
def test_singular_values_become_about_1(dtype, ends):
    """Those from a hundredth of the norm up, and directions stay. Nothing of a matrix of zeros is infinite."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(4, 48, rows, generator=generator))[0] for rows in (24, 24))
    sizes = torch.linspace(0.02, 0.35, 24)
    assert (orthogonalised(torch.zeros(1, 24, 48, dtype=dtype)) == 0).all()
    made = orthogonalised((u * sizes @ v.mT).to(dtype)).float()
    found = u.mT @ made @ v
    values = found.diagonal(dim1=1, dim2=2)
    assert ends[0] < values.min() and values.max() < ends[1]
    assert (found - torch.diag_embed(values)).abs().max() < (1e-4 if dtype == torch.float32 else 0.05)


def test_one_update_of_many_matrices_is_that_of_each():
    """Fused ones, tall and wide ones, and those of experts; AdamW for the rest, routers too; three steps."""
    config = TransformerConfig(
        model_size="mixtral_tiny", optimizer="muon", weight_decay=0.1, num_layers=2, vocab_size=64
    )
    ours, theirs = Llama(config.shape), Llama(config.shape)
    ours.initialise(0)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(config, ours)
    matrices = [name for name, _ in theirs.named_parameters() if is_matrix(name) and "." in name]
    matrices = [name for name in matrices if "router" not in name]
    assert len(matrices) >= 8
    rest = [p for name, p in theirs.named_parameters() if name not in matrices and is_matrix(name)]
    vectors = [p for name, p in theirs.named_parameters() if not is_matrix(name)]
    groups = [{"params": rest}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    buffers = {name: torch.zeros_like(theirs.get_parameter(name)) for name in matrices}
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in ours.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            theirs.get_parameter(name).grad = parameter.grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor([0.01])
        optimizer.step()
        adam.step()
        for name, buffer in buffers.items():
            plain_muon(theirs.get_parameter(name), buffer, 0.01)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name), rtol=2e-5, atol=2e-6, msg=name)


def test_a_model_that_muon_would_leave_to_adamw_is_refused():
    """In a copy of the script: a model with other names, or the optimizer made without language/build.py."""
    config = TransformerConfig(optimizer="muon")
    other = torch.nn.Linear(4, 4)
    other.trained = lambda: dict(other.named_parameters())
    with pytest.raises(InputError, match="no parameter has the name of a layer's matrix; expected adamw"):
        build_optimizer(config, other)
    with pytest.raises(InputError, match="optimizer is muon, which make_optimizer does not make; expected adam, adamw"):
        make_optimizer(config, other.parameters())
