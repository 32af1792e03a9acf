"""Pooling neighbouring tokens into one compressed entry: public op.

E entries, R tokens an entry, C latent channels.
"""

from __future__ import annotations

import torch
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


def pool_pairs(
    fresh_TX: Tensor,
    content_SRC: Tensor,
    gate_SRC: Tensor,
    slot_T: Tensor,
    position_T: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """`pool_groups` of each row and the row before it, which a ring by position remembers: [T, C] in `dtype`.

    Rows of one slot lie side by side in the order of their positions, fewer than R of them.

    Args:
        fresh_TX: float32, content and gate side by side; they join the rings.
        content_SRC: float32 rings by slot; position p lies in row `p % R`.
    """
    check.shape("pool_pairs", "fresh", fresh_TX, slot_T.shape[0], 2 * content_SRC.shape[-1])
    run = select("pool_pairs", fresh_TX)
    return run(fresh_TX, content_SRC, gate_SRC, slot_T, position_T, dtype)
