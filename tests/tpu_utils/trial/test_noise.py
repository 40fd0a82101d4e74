"""What a trial on the host sees of random numbers."""

import torch
import torch.nn.functional as F

from tpu_utils.trial.trials import RowsAlike


def test_attention_without_dropout_draws_nothing():
    """Of every model with nn.MultiheadAttention was said that its evaluation draws random numbers."""
    q = torch.randn(2, 1, 4, 8)
    for dropout in (0.0, 0.5):
        with RowsAlike() as noise:
            F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)
            F.dropout(q, dropout, training=dropout > 0)
        assert bool(noise.drawn) == (dropout > 0)
