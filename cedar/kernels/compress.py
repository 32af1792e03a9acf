"""Pooling neighbouring tokens into one compressed entry: public op.

E entries, R tokens an entry, C latent channels.
"""

from __future__ import annotations

from torch import Tensor

from cedar.kernels import check
from cedar.kernels.dispatch import row_op, select


@row_op(2)
def pool_groups(content_ERC: Tensor, gate_ERC: Tensor) -> Tensor:
    """Each channel's gated mean over the group's tokens, float32 [E, C].

    Args:
        content_ERC: float32.
        gate_ERC: float32; the softmax runs over the R tokens, channel by channel.

    Source: architecture.md 4.1.
    """
    check.shape("pool_groups", "gate", gate_ERC, *content_ERC.shape)
    run = select("pool_groups", content_ERC, gate_ERC)
    return run(content_ERC, gate_ERC)
