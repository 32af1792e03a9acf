"""Places and rotations of a decode step's rows in one kernel, a row a program.

T rows, S slots, L layers, R angles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.pages import Located
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import next_power_of_2, unavailable

__all__ = ["FORWARD_ONLY", "fits", "locate", "unavailable"]

FORWARD_ONLY = ("locate",)


def fits(op: str, slots: Tensor) -> bool:
    """Any rows."""
    return slots.numel() > 0


@triton.jit
def _turn(cos_ptr, sin_ptr, position, frequency, place, inside):
    angle = position.to(tl.float32) * frequency
    tl.store(cos_ptr + place, tl.cos(angle), mask=inside)
    tl.store(sin_ptr + place, tl.sin(angle), mask=inside)


@triton.jit
def _locate(
    slot_ptr, position_ptr, floor_ptr, page_ptr, window_frequency_ptr, frequency_ptr,
    busy_ptr, pair_ptr, where_ptr, floor_out_ptr, turn_ptr,
    num_rows, num_slots, num_layers, max_pages, num_angles,
    RING: tl.constexpr, PAGE: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    follow()
    t = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slot_ptr + t), tl.load(position_ptr + t)
    busy = slot < num_slots - 1
    tl.store(busy_ptr + t, busy)
    tl.store(pair_ptr + t, busy & (position % 2 == 1))
    # seven numbers a row: ring, visible, visible pairs, page and row of an entry, page and row of a pair
    where = where_ptr + t
    tl.store(where, position % RING)
    tl.store(where + num_rows, position + 1)
    tl.store(where + 2 * num_rows, (position + 1) // 2)
    pages = page_ptr + slot * max_pages
    tl.store(where + 3 * num_rows, tl.load(pages + position // PAGE))
    tl.store(where + 4 * num_rows, position % PAGE)
    pair = position // 2
    tl.store(where + 5 * num_rows, tl.load(pages + pair // (PAGE // 2)))
    tl.store(where + 6 * num_rows, pair % (PAGE // 2))
    layer = tl.arange(0, L)
    known = layer < num_layers
    floor = tl.load(floor_ptr + layer.to(tl.int64) * num_slots + slot, mask=known, other=0)
    tl.store(floor_out_ptr + layer * num_rows + t, floor, mask=known)
    angle = tl.arange(0, R)
    inside = angle < num_angles
    frequency = tl.load(frequency_ptr + angle, mask=inside, other=0.0)
    window_frequency = tl.load(window_frequency_ptr + angle, mask=inside, other=0.0)
    place, size = t * num_angles + angle, num_rows * num_angles
    _turn(turn_ptr, turn_ptr + size, position, window_frequency, place, inside)
    _turn(turn_ptr + 2 * size, turn_ptr + 3 * size, position, frequency, place, inside)
    _turn(turn_ptr + 4 * size, turn_ptr + 5 * size, tl.maximum(position - 1, 0), frequency, place, inside)


def locate(
    slot_T: Tensor,
    position_T: Tensor,
    floor_LS: Tensor,
    page_SP: Tensor,
    window_frequency_R: Tensor,
    frequency_R: Tensor,
    num_ring: int,
    page_tokens: int,
) -> Located:
    num_rows, device = slot_T.shape[0], slot_T.device
    (num_layers, num_slots), num_angles = floor_LS.shape, frequency_R.shape[0]
    busy_T, pair_T = (torch.empty(num_rows, dtype=torch.bool, device=device) for _ in range(2))
    where = torch.empty(7, num_rows, dtype=torch.int64, device=device)
    floor_LT = torch.empty(num_layers, num_rows, dtype=torch.int64, device=device)
    turn = torch.empty(6, num_rows, num_angles, dtype=torch.float32, device=device)
    _locate[(num_rows,)](
        slot_T, position_T, floor_LS, page_SP, window_frequency_R, frequency_R, busy_T, pair_T, where, floor_LT, turn,
        num_rows, num_slots, num_layers, page_SP.shape[1], num_angles,
        RING=num_ring, PAGE=page_tokens, L=next_power_of_2(num_layers), R=next_power_of_2(num_angles), num_warps=1,
        launch_pdl=AHEAD,
    )  # fmt: skip
    ring_T, *rest = where.unbind(0)
    return Located(busy_T, pair_T, ring_T, floor_LT, *rest, *turn.unbind(0))
