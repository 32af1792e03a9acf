"""The hash in 64-bit integers and the gate in float32, line for line."""

from __future__ import annotations

import torch
from torch import Tensor

from cedar.formats.spec import FP8, FormatSpec
from cedar.kernels.quantize import dequantize_rows, round_rows


def engram_rows(compressed_TL: Tensor, multiplier_L: Tensor, prime_K: Tensor, offset_K: Tensor) -> Tensor:
    num_heads = prime_K.shape[0] // (multiplier_L.shape[0] - 1)
    product_TL = compressed_TL * multiplier_L
    running_T = product_TL[:, 0]
    mixed = []
    for lookback in range(1, multiplier_L.shape[0]):
        # each longer n-gram continues the exclusive-or of the shorter one
        running_T = torch.bitwise_xor(running_T, product_TL[:, lookback])
        mixed.append(running_T)
    mixed_TK = torch.stack(mixed, dim=-1).repeat_interleave(num_heads, dim=-1)
    return mixed_TK % prime_K + offset_K


def engram_gate(
    streams_TND: Tensor,
    key_TND: Tensor,
    value_TD: Tensor,
    dead_T: Tensor,
    query_weight_ND: Tensor,
    key_weight_ND: Tensor,
    eps: float,
) -> Tensor:
    stream32, key32 = streams_TND.float(), key_TND.float()
    weight_ND = query_weight_ND.float() * key_weight_ND.float()
    dot_TN = (stream32 * weight_ND * key32).sum(-1)
    dot_TN = dot_TN * torch.rsqrt(stream32.square().mean(-1) + eps) * torch.rsqrt(key32.square().mean(-1) + eps)
    dot_TN = dot_TN * streams_TND.shape[-1] ** -0.5
    # the clamp bounds the slope of the root at 0; +0 counts as positive
    gate_TN = torch.sigmoid(torch.copysign(dot_TN.abs().clamp(min=1e-6).sqrt(), dot_TN))
    gate_TN = gate_TN.masked_fill(dead_T.unsqueeze(-1), 0.0)
    return (stream32 + gate_TN.unsqueeze(-1) * value_TD.float().unsqueeze(1)).to(streams_TND.dtype)


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
    row_TK = engram_rows(compressed_TL, multiplier_L, prime_K, offset_K)
    where_TK = row_TK.to(codes.device)
    memory_TX = dequantize_rows(codes[where_TK], scales[where_TK], FP8, dtype).to(row_TK.device).flatten(1)
    return memory_TX if spec is None else round_rows(memory_TX, spec)


def look_back(
    ids_T: Tensor,
    history_SH: Tensor,
    slot_T: Tensor,
    position_T: Tensor,
    compressed_V: Tensor,
    num_lookbacks: int,
    image_token_id: int,
    pad_token_id: int,
) -> Tensor:
    num_columns = history_SH.shape[1]
    history_SH[slot_T, position_T % num_columns] = ids_T
    place_TL = position_T.unsqueeze(-1) - torch.arange(num_lookbacks, device=ids_T.device)
    newest_TL = history_SH[slot_T.unsqueeze(-1), place_TL % num_columns].masked_fill(place_TL < 0, -1)
    broken_TL = (newest_TL == image_token_id) | (newest_TL < 0)
    dead_TL = broken_TL.int().cumsum(-1) > 0
    return torch.where(dead_TL, compressed_V[pad_token_id], compressed_V[newest_TL.clamp(min=0)])
