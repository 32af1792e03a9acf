"""Hashed n-gram addresses and the gated injection: public ops.

T rows, L look-backs (current token first), K table columns, N streams, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.spec import FormatSpec
from cedar.kernels import check
from cedar.kernels.dispatch import row_op, select


def engram_rows(compressed_TL: Tensor, multiplier_L: Tensor, prime_K: Tensor, offset_K: Tensor) -> Tensor:
    """Table rows of each token's n-grams, int64 [T, K].

    Args:
        compressed_TL: Compressed ids, int64, dead look-backs already replaced by the pad's.
        multiplier_L: int64; the products stay below 2**63.
        prime_K: Modulus of each column, ordered by n-gram size, then head.
        offset_K: First row of each column.

    Source: engram-dspark-vision-chat.md 1.4.
    """
    check.shape("engram_rows", "multiplier", multiplier_L, compressed_TL.shape[-1])
    run = select("engram_rows", compressed_TL)
    return run(compressed_TL, multiplier_L, prime_K, offset_K)


@row_op(4)
def engram_gate(
    streams_TND: Tensor,
    key_TND: Tensor,
    value_TD: Tensor,
    dead_T: Tensor,
    query_weight_ND: Tensor,
    key_weight_ND: Tensor,
    eps: float,
) -> Tensor:
    """The streams with the memory's value added, gated by how well each stream matches its key.

    Args:
        dead_T: bool, True at image tokens: their gate is 0.

    Source: engram-dspark-vision-chat.md 1.6.
    """
    check.shape("engram_gate", "key", key_TND, *streams_TND.shape)
    run = select("engram_gate", streams_TND, key_TND, value_TD, query_weight_ND, key_weight_ND)
    return run(streams_TND, key_TND, value_TD, dead_T, query_weight_ND, key_weight_ND, eps)


def engram_memory(
    compressed_TL: Tensor,
    multiplier_L: Tensor,
    prime_K: Tensor,
    offset_K: Tensor,
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    spec: FormatSpec | None,
) -> Tensor:
    """The table rows that `engram_rows` names, decoded, side by side: [T, K * channels].

    Args:
        spec: What they are rounded to for the product that reads them; None leaves them.
        codes: uint8 E4M3 [rows, channels], on the device of the ids or in host memory that is pinned.
        scales: uint8 E8M0 [rows, channels / 32].
    """
    run = select("engram_memory", compressed_TL, codes)
    return run(compressed_TL, multiplier_L, prime_K, offset_K, codes, scales, dtype, spec)


def look_back(
    ids_T: Tensor,
    history_SH: Tensor,
    slot_T: Tensor,
    position_T: Tensor,
    compressed_V: Tensor,
    *,
    num_lookbacks: int,
    image_token_id: int,
    pad_token_id: int,
) -> Tensor:
    """The compressed ids of each row's token and of those before it, newest first [T, L]; the token joins its history.

    An image token, a token that does not exist (-1) and everything older than one of these count as the pad. Rows of
    one slot lie side by side in the order of their positions, at most H - L + 1 of them.

    Args:
        history_SH: Raw ids by slot, int64; written. Position p lies in column `p % H`.
        compressed_V: Raw id -> compressed id.

    Source: engram-dspark-vision-chat.md 1.2.
    """
    check.shape("look_back", "slot", slot_T, ids_T.shape[0])
    check.shape("look_back", "position", position_T, ids_T.shape[0])
    run = select("look_back", ids_T)
    return run(ids_T, history_SH, slot_T, position_T, compressed_V, num_lookbacks, image_token_id, pad_token_id)
