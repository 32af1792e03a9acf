"""The best score of each block of entries, and infinity where the newest entry is.

T rows, E entries, N blocks of M entries, B blocks of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2, unavailable

__all__ = ["FORWARD_ONLY", "block_scores", "fits", "unavailable"]

FORWARD_ONLY = ("block_scores",)
_ENTRIES = 2048


def fits(op: str, score: Tensor) -> bool:
    """float32."""
    return score.numel() > 0 and score.dtype == torch.float32 and score.stride(1) == 1


@triton.jit
def _block_scores(
    score_ptr, visible_ptr, out_ptr, row_stride, num_entries, num_blocks, block_size, M: tl.constexpr, B: tl.constexpr
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    block, member = tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, M)
    entry = block[:, None] * block_size + member[None, :]
    inside = (member < block_size)[None, :] & (entry < num_entries)
    score = tl.load(score_ptr + t * row_stride + entry, mask=inside, other=float("-inf"))
    visible = tl.load(visible_ptr + t)
    newest = (visible - 1) // block_size
    best = tl.where((visible > 0) & (block == newest), float("inf"), tl.max(score, axis=1))
    tl.store(out_ptr + t * num_blocks + block, best, mask=block < num_blocks)


def block_scores(score_TE: Tensor, visible_T: Tensor, block_size: int) -> Tensor:
    num_rows, num_entries = score_TE.shape
    num_blocks, width = triton.cdiv(num_entries, block_size), next_power_of_2(block_size)
    out_TN = torch.empty(num_rows, num_blocks, device=score_TE.device, dtype=torch.float32)
    blocks = max(1, _ENTRIES // width)
    _block_scores[(num_rows, triton.cdiv(num_blocks, blocks))](
        score_TE, visible_T, out_TN, score_TE.stride(0), num_entries, num_blocks, block_size, M=width, B=blocks,
        num_warps=4, launch_pdl=AHEAD,
    )  # fmt: skip
    return out_TN
