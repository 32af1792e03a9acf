"""Hyper-connections: each step reads the streams once and keeps a row's mixing in registers.

T rows, N streams (a power of two), D channels a stream, M = N * (2 + N) predicted coefficients, P rows and B
channels of a block. The gradients are written by hand: the Sinkhorn passes run backwards from their result
and the sums they divided by, so nothing else is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cedar.kernels.triton.device import is_half_or_float, next_power_of_2, unavailable

__all__ = ["collapse", "expand", "fits", "mix_coefficients", "unavailable"]

# elements of a block that one program holds
_BLOCK = 4096
# blocks of rows whose shares of a weight's gradient are added up apart
_SPLITS = 128


def fits(op: str, streams_TND: Tensor, *others: Tensor) -> bool:
    """bfloat16 or float32 streams, their number a power of two."""
    num_streams = streams_TND.shape[-2]
    return is_half_or_float(streams_TND) and num_streams & (num_streams - 1) == 0 and streams_TND.shape[0] > 0


# the prediction


@triton.jit
def _exact_dot(x, weight, total):
    """`total + x @ weight` with a float32 weight; bfloat16 rows meet its three bfloat16 parts, which loses nothing."""
    if x.dtype == tl.float32:
        total += tl.dot(x, weight, input_precision="ieee")
    else:
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total += tl.dot(x, high) + tl.dot(x, middle) + tl.dot(x, low)
    return total


@triton.jit
def _project(
    x_ptr, fn_ptr, mixed_ptr, inverse_ptr, num_rows, width, rms_eps,
    M: tl.constexpr, M_PAD: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    column = tl.arange(0, M_PAD)
    mixed = tl.zeros([P, M_PAD], tl.float32)
    square = tl.zeros([P], tl.float32)
    for start in range(0, width, B):
        channel = start + tl.arange(0, B)
        inside = (row[:, None] < num_rows) & (channel[None, :] < width)
        x = tl.load(x_ptr + row[:, None] * width + channel[None, :], mask=inside, other=0.0)
        weight = tl.load(
            fn_ptr + column[None, :] * width + channel[:, None],
            mask=(column[None, :] < M) & (channel[:, None] < width),
            other=0.0,
        )
        mixed = _exact_dot(x, weight, mixed)
        square += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    inverse = 1.0 / tl.sqrt(square / width + rms_eps)
    tl.store(inverse_ptr + row, inverse, mask=row < num_rows)
    tl.store(
        mixed_ptr + row[:, None] * M + column[None, :],
        mixed * inverse[:, None],
        mask=(row[:, None] < num_rows) & (column[None, :] < M),
    )


@triton.jit
def _coefficients(
    mixed_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, sums_ptr, num_rows, eps,
    ITERATIONS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = N * (2 + N)
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    stream = tl.arange(0, N)
    inside = (row < num_rows)[:, None]
    place = row[:, None] * M + stream[None, :]
    pre = tl.load(mixed_ptr + place, mask=inside, other=0.0) * tl.load(scale_ptr)
    pre = tl.sigmoid(pre + tl.load(base_ptr + stream)[None, :]) + eps
    tl.store(pre_ptr + row[:, None] * N + stream[None, :], pre, mask=inside)
    post = tl.load(mixed_ptr + N + place, mask=inside, other=0.0) * tl.load(scale_ptr + 1)
    post = 2.0 * tl.sigmoid(post + tl.load(base_ptr + N + stream)[None, :])
    tl.store(post_ptr + row[:, None] * N + stream[None, :], post, mask=inside)

    cell = stream[:, None] * N + stream[None, :]
    inside3 = (row < num_rows)[:, None, None]
    logit = tl.load(mixed_ptr + 2 * N + row[:, None, None] * M + cell[None, :, :], mask=inside3, other=0.0)
    logit = logit * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + cell)[None, :, :]
    comb = tl.exp(logit - tl.max(logit, axis=2)[:, :, None])
    comb = comb / tl.sum(comb, axis=2)[:, :, None] + eps
    # the sums that each pass divides by are all that the backward needs
    sums = sums_ptr + row[:, None] * ((2 * ITERATIONS - 1) * N) + stream[None, :]
    total = tl.sum(comb, axis=1) + eps
    tl.store(sums, total, mask=inside)
    comb = comb / total[:, None, :]
    for number in range(ITERATIONS - 1):
        total = tl.sum(comb, axis=2) + eps
        tl.store(sums + (2 * number + 1) * N, total, mask=inside)
        comb = comb / total[:, :, None]
        total = tl.sum(comb, axis=1) + eps
        tl.store(sums + (2 * number + 2) * N, total, mask=inside)
        comb = comb / total[:, None, :]
    tl.store(comb_ptr + row[:, None, None] * (N * N) + cell[None, :, :], comb, mask=inside3)


@triton.jit
def _coefficients_backward(
    pre_ptr, post_ptr, comb_ptr, sums_ptr, grad_pre_ptr, grad_post_ptr, grad_comb_ptr, grad_ptr, num_rows, eps,
    ITERATIONS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = N * (2 + N)
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    stream = tl.arange(0, N)
    inside = (row < num_rows)[:, None]
    place = row[:, None] * N + stream[None, :]
    out = row[:, None] * M + stream[None, :]
    gate = tl.load(pre_ptr + place, mask=inside, other=0.0) - eps
    grad = tl.load(grad_pre_ptr + place, mask=inside, other=0.0)
    tl.store(grad_ptr + out, grad * gate * (1.0 - gate), mask=inside)
    gate = tl.load(post_ptr + place, mask=inside, other=0.0) * 0.5
    grad = tl.load(grad_post_ptr + place, mask=inside, other=0.0)
    tl.store(grad_ptr + N + out, 2.0 * grad * gate * (1.0 - gate), mask=inside)

    cell = stream[:, None] * N + stream[None, :]
    inside3 = (row < num_rows)[:, None, None]
    place3 = row[:, None, None] * (N * N) + cell[None, :, :]
    comb = tl.load(comb_ptr + place3, mask=inside3, other=0.0)
    grad = tl.load(grad_comb_ptr + place3, mask=inside3, other=0.0)
    sums = sums_ptr + row[:, None] * ((2 * ITERATIONS - 1) * N) + stream[None, :]
    # y = x / s with s = sum(x) + eps: dx = (dy - sum(dy y)) / s, and x = y s
    for number in range(ITERATIONS - 1):
        total = tl.load(sums + 2 * (ITERATIONS - 1 - number) * N, mask=inside, other=1.0)
        grad = (grad - tl.sum(grad * comb, axis=1)[:, None, :]) / total[:, None, :]
        comb = comb * total[:, None, :]
        total = tl.load(sums + (2 * (ITERATIONS - 1 - number) - 1) * N, mask=inside, other=1.0)
        grad = (grad - tl.sum(grad * comb, axis=2)[:, :, None]) / total[:, :, None]
        comb = comb * total[:, :, None]
    total = tl.load(sums, mask=inside, other=1.0)
    grad = (grad - tl.sum(grad * comb, axis=1)[:, None, :]) / total[:, None, :]
    share = comb * total[:, None, :] - eps
    grad = share * (grad - tl.sum(grad * share, axis=2)[:, :, None])
    tl.store(grad_ptr + 2 * N + row[:, None, None] * M + cell[None, :, :], grad, mask=inside3)


@triton.jit
def _project_backward_x(
    x_ptr, fn_ptr, mixed_ptr, inverse_ptr, grad_ptr, grad_x_ptr, num_rows, width,
    PRECISION: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    column = tl.arange(0, M_PAD)
    known = (row[:, None] < num_rows) & (column[None, :] < M)
    grad = tl.load(grad_ptr + row[:, None] * M + column[None, :], mask=known, other=0.0)
    mixed = tl.load(mixed_ptr + row[:, None] * M + column[None, :], mask=known, other=0.0)
    inverse = tl.load(inverse_ptr + row, mask=row < num_rows, other=0.0)
    inside = (row[:, None] < num_rows) & (channel[None, :] < width)
    x = tl.load(x_ptr + row[:, None] * width + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(
        fn_ptr + column[:, None] * width + channel[None, :],
        mask=(column[:, None] < M) & (channel[None, :] < width),
        other=0.0,
    )
    # the statistic is an input too
    through_rms = tl.sum(grad * mixed, axis=1) * inverse * inverse / width
    grad_x = tl.dot(grad * inverse[:, None], weight, input_precision=PRECISION) - through_rms[:, None] * x
    tl.store(grad_x_ptr + row[:, None] * width + channel[None, :], grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _project_backward_fn(
    x_ptr, inverse_ptr, grad_ptr, grad_fn_ptr, num_rows, width, rows_a_split,
    PRECISION: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    column = tl.arange(0, M_PAD)
    total = tl.zeros([M_PAD, B], tl.float32)
    first = split.to(tl.int64) * rows_a_split
    for start in range(0, rows_a_split, P):
        row = first + start + tl.arange(0, P)
        inside = (row < num_rows) & (row < first + rows_a_split)
        inverse = tl.load(inverse_ptr + row, mask=inside, other=0.0)
        grad = tl.load(
            grad_ptr + row[None, :] * M + column[:, None], mask=inside[None, :] & (column[:, None] < M), other=0.0
        )
        x = tl.load(
            x_ptr + row[:, None] * width + channel[None, :],
            mask=inside[:, None] & (channel[None, :] < width),
            other=0.0,
        ).to(tl.float32)
        total += tl.dot(grad * inverse[None, :], x, input_precision=PRECISION)
    tl.store(
        grad_fn_ptr + (split.to(tl.int64) * M + column[:, None]) * width + channel[None, :],
        total,
        mask=(column[:, None] < M) & (channel[None, :] < width),
    )


class _MixCoefficients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        streams_TND: Tensor,
        fn: Tensor,
        scale_3: Tensor,
        base: Tensor,
        iterations: int,
        eps: float,
        rms_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_streams, channels = streams_TND.shape
        width, num_mixes = num_streams * channels, num_streams * (2 + num_streams)
        streams_TND, fn = streams_TND.contiguous(), fn.contiguous()
        new: dict[str, Any] = {"device": fn.device, "dtype": torch.float32}
        mixed_TM, inverse_T = torch.empty(num_rows, num_mixes, **new), torch.empty(num_rows, **new)
        pad = max(16, next_power_of_2(num_mixes))
        _project[(triton.cdiv(num_rows, 64),)](
            streams_TND, fn, mixed_TM, inverse_T, num_rows, width, rms_eps, M=num_mixes, M_PAD=pad, P=64, B=64
        )
        pre_TN = torch.empty(num_rows, num_streams, **new)
        post_TN = torch.empty_like(pre_TN)
        mixing_TNN = torch.empty(num_rows, num_streams, num_streams, **new)
        sums = torch.empty(num_rows, 2 * iterations - 1, num_streams, **new)
        _coefficients[(triton.cdiv(num_rows, 64),)](
            mixed_TM, scale_3, base, pre_TN, post_TN, mixing_TNN, sums, num_rows, eps,
            ITERATIONS=iterations, N=num_streams, P=64,
        )  # fmt: skip
        ctx.save_for_backward(streams_TND, fn, scale_3, mixed_TM, inverse_T, pre_TN, post_TN, mixing_TNN, sums)
        ctx.iterations, ctx.eps = iterations, eps
        return pre_TN, post_TN, mixing_TNN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        streams_TND, fn, scale_3, mixed_TM, inverse_T, pre_TN, post_TN, mixing_TNN, sums = ctx.saved_tensors
        num_rows, num_streams, channels = streams_TND.shape
        width, num_mixes = num_streams * channels, mixed_TM.shape[1]
        grad_pre, grad_post, grad_comb = (
            torch.zeros_like(value) if grad is None else grad.contiguous()
            for grad, value in zip(grads, (pre_TN, post_TN, mixing_TNN), strict=True)
        )
        grad_TM = torch.empty_like(mixed_TM)
        _coefficients_backward[(triton.cdiv(num_rows, 64),)](
            pre_TN, post_TN, mixing_TNN, sums, grad_pre, grad_post, grad_comb, grad_TM, num_rows, ctx.eps,
            ITERATIONS=ctx.iterations, N=num_streams, P=64,
        )  # fmt: skip
        parts = [num_streams, num_streams, num_streams * num_streams]
        grad_base = grad_TM.sum(0)
        grad_scale = torch.stack([part.sum() for part in (grad_TM * mixed_TM).sum(0).split(parts)])
        grad_TM = grad_TM * torch.cat([scale_3[i].expand(part) for i, part in enumerate(parts)])
        pad = max(16, next_power_of_2(num_mixes))
        grad_x = torch.empty_like(streams_TND)
        # a gradient that ends in bfloat16 needs no float32 product
        precision = "ieee" if streams_TND.dtype == torch.float32 else "tf32"
        _project_backward_x[(triton.cdiv(num_rows, 64), triton.cdiv(width, 64))](
            streams_TND, fn, mixed_TM, inverse_T, grad_TM, grad_x, num_rows, width,
            PRECISION=precision, M=num_mixes, M_PAD=pad, P=64, B=64,
        )  # fmt: skip
        splits = max(1, min(_SPLITS, num_rows // 256))
        grad_fn = torch.empty(splits, num_mixes, width, device=fn.device, dtype=torch.float32)
        _project_backward_fn[(splits, triton.cdiv(width, 64))](
            streams_TND, inverse_T, grad_TM, grad_fn, num_rows, width, triton.cdiv(num_rows, splits),
            PRECISION=precision, M=num_mixes, M_PAD=pad, P=32, B=64,
        )  # fmt: skip
        return grad_x, grad_fn.sum(0), grad_scale, grad_base, None, None, None


def mix_coefficients(
    streams_TND: Tensor, fn: Tensor, scale_3: Tensor, base: Tensor, iterations: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = _MixCoefficients.apply(
        streams_TND, fn, scale_3, base, iterations, eps, rms_eps
    )
    return result


# the mixing


@triton.jit
def _collapse(x_ptr, premix_ptr, y_ptr, num_rows, channels, N: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    inside = (row[:, None] < num_rows) & (channel[None, :] < channels)
    y = tl.zeros([P, B], tl.float32)
    for i in tl.static_range(N):
        x = tl.load(x_ptr + (row[:, None] * N + i) * channels + channel[None, :], mask=inside, other=0.0)
        y += tl.load(premix_ptr + row * N + i, mask=row < num_rows, other=0.0)[:, None] * x.to(tl.float32)
    tl.store(y_ptr + row[:, None] * channels + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _collapse_backward(
    x_ptr, premix_ptr, grad_y_ptr, grad_x_ptr, grad_premix_ptr, num_rows, channels,
    N: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.arange(0, B)
    inside = (row[:, None] < num_rows) & (channel[None, :] < channels)
    grad_y = tl.load(grad_y_ptr + row[:, None] * channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(N):
        place = (row[:, None] * N + i) * channels + channel[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        premix = tl.load(premix_ptr + row * N + i, mask=row < num_rows, other=0.0)
        tl.store(grad_x_ptr + place, (premix[:, None] * grad_y).to(grad_x_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_premix_ptr + row * N + i, tl.sum(x * grad_y, axis=1), mask=row < num_rows)


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams_TND: Tensor, premix_TN: Tensor) -> Tensor:
        num_rows, num_streams, channels = streams_TND.shape
        streams_TND, premix_TN = streams_TND.contiguous(), premix_TN.contiguous()
        y_TD = streams_TND.new_empty(num_rows, channels)
        width = min(next_power_of_2(channels), 1024)
        rows = _BLOCK // width
        _collapse[(triton.cdiv(num_rows, rows), triton.cdiv(channels, width))](
            streams_TND, premix_TN, y_TD, num_rows, channels, N=num_streams, P=rows, B=width
        )
        ctx.save_for_backward(streams_TND, premix_TN)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        streams_TND, premix_TN = ctx.saved_tensors
        num_rows, num_streams, channels = streams_TND.shape
        grad_x, grad_premix = torch.empty_like(streams_TND), torch.empty_like(premix_TN)
        width = next_power_of_2(channels)
        rows = max(1, _BLOCK // width)
        _collapse_backward[(triton.cdiv(num_rows, rows),)](
            streams_TND, premix_TN, grads[0].contiguous(), grad_x, grad_premix, num_rows, channels,
            N=num_streams, P=rows, B=width,
        )  # fmt: skip
        return grad_x, grad_premix


def collapse(streams_TND: Tensor, premix_TN: Tensor) -> Tensor:
    result: Tensor = _Collapse.apply(streams_TND, premix_TN)
    return result


@triton.jit
def _expand(
    y_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, num_rows, channels, N: tl.constexpr, P: tl.constexpr, B: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * B + tl.arange(0, B)
    inside = (row[:, None] < num_rows) & (channel[None, :] < channels)
    known = row < num_rows
    y = tl.load(y_ptr + row[:, None] * channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(N):
        total = tl.load(post_ptr + row * N + j, mask=known, other=0.0)[:, None] * y
        for i in tl.static_range(N):
            x = tl.load(x_ptr + (row[:, None] * N + i) * channels + channel[None, :], mask=inside, other=0.0)
            weight = tl.load(comb_ptr + (row * N + i) * N + j, mask=known, other=0.0)
            total += weight[:, None] * x.to(tl.float32)
        place = (row[:, None] * N + j) * channels + channel[None, :]
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expand_backward(
    y_ptr, x_ptr, post_ptr, comb_ptr, grad_ptr, grad_y_ptr, grad_x_ptr, grad_post_ptr, grad_comb_ptr,
    num_rows, channels, N: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.arange(0, B)
    inside = (row[:, None] < num_rows) & (channel[None, :] < channels)
    known = row < num_rows
    y = tl.load(y_ptr + row[:, None] * channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    grad_y = tl.zeros([P, B], tl.float32)
    for j in tl.static_range(N):
        place = (row[:, None] * N + j) * channels + channel[None, :]
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad_y += tl.load(post_ptr + row * N + j, mask=known, other=0.0)[:, None] * grad
        tl.store(grad_post_ptr + row * N + j, tl.sum(grad * y, axis=1), mask=known)
    tl.store(
        grad_y_ptr + row[:, None] * channels + channel[None, :], grad_y.to(grad_y_ptr.dtype.element_ty), mask=inside
    )
    for i in tl.static_range(N):
        place = (row[:, None] * N + i) * channels + channel[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad_x = tl.zeros([P, B], tl.float32)
        for j in tl.static_range(N):
            grad = tl.load(grad_ptr + (row[:, None] * N + j) * channels + channel[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            cell = (row * N + i) * N + j
            grad_x += tl.load(comb_ptr + cell, mask=known, other=0.0)[:, None] * grad
            tl.store(grad_comb_ptr + cell, tl.sum(grad * x, axis=1), mask=known)
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, mixing_TNN: Tensor) -> Tensor:
        num_rows, num_streams, channels = streams_TND.shape
        y_TD, streams_TND, post_TN, mixing_TNN = (
            tensor.contiguous() for tensor in (y_TD, streams_TND, post_TN, mixing_TNN)
        )
        out_TND = torch.empty_like(streams_TND)
        width = min(next_power_of_2(channels), 1024)
        rows = _BLOCK // width
        _expand[(triton.cdiv(num_rows, rows), triton.cdiv(channels, width))](
            y_TD, streams_TND, post_TN, mixing_TNN, out_TND, num_rows, channels, N=num_streams, P=rows, B=width
        )
        ctx.save_for_backward(y_TD, streams_TND, post_TN, mixing_TNN)
        return out_TND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y_TD, streams_TND, post_TN, mixing_TNN = ctx.saved_tensors
        num_rows, num_streams, channels = streams_TND.shape
        outputs = [torch.empty_like(tensor) for tensor in (y_TD, streams_TND, post_TN, mixing_TNN)]
        width = next_power_of_2(channels)
        rows = max(1, _BLOCK // width)
        _expand_backward[(triton.cdiv(num_rows, rows),)](
            y_TD, streams_TND, post_TN, mixing_TNN, grads[0].contiguous(), *outputs, num_rows, channels,
            N=num_streams, P=rows, B=width,
        )  # fmt: skip
        return tuple(outputs)


def expand(y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, mixing_TNN: Tensor) -> Tensor:
    result: Tensor = _Expand.apply(y_TD, streams_TND, post_TN, mixing_TNN)
    return result
