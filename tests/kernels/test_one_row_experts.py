"""The assembly of `one_row_experts`, a warp at a time on numpy: the interpreter of its kernels cannot run it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cedar.formats import fp4
from cedar.kernels.experts import Packed, retile
from cedar.kernels.reference.experts import _matrices
from tests.kernels.ptx_on_numpy import Register, run_warp

pytest.importorskip("triton", reason="Triton is not installed: its kernels run nowhere here")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_warp_multiplies_sixteen_outputs_of_a_step(dtype: torch.dtype) -> None:
    from cedar.kernels.triton import one_row_experts as kernel

    tiled = retile(Packed(*fp4.quantize_fp4_index(torch.randn(1, 64, 512) * torch.rand(1, 64, 512) * 3)))
    x = torch.randn(512).to(dtype)
    want = _matrices(tiled, 512, torch.float32)[0, :, 256:] @ x[256:].half().float()
    codes, scales, two = (
        part.numpy().view(np.uint32)
        for part in (tiled.codes[0, 0, 1], tiled.scales[0, 0, 1], x[256:].view(torch.int32))
    )
    lane = np.arange(32)
    column, q = divmod(lane, 4)
    group = column % 2 * 4 + q
    pair = (kernel._PAIR_HALF if dtype == torch.float16 else kernel._PAIR).value
    for warp in range(4):
        held: dict[str, Register] = {"$48": scales[32 * warp + lane]}
        for part in range(4):
            words = {f"${4 + i}": np.where(column // 2 == q, two[group * 16 + part * 4 + i], 0) for i in range(4)}
            pairs = run_warp(pair, words)
            held |= {f"${32 + 4 * part + i}": pairs[f"${i}"] for i in range(4)}
            held |= {f"${16 + 4 * part + i}": codes[512 * part + 128 * warp + 4 * lane + i] for i in range(4)}
        got = run_warp(kernel._MULTIPLY.value, held)
        for half in range(2):
            y = got[f"${half}"].view(np.float32).reshape(8, 4).sum(1) * 128
            first = 16 * warp + 8 * half
            np.testing.assert_allclose(y, want[first : first + 8].numpy(), rtol=1e-4, atol=1e-4)
