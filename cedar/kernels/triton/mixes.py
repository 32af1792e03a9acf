"""From a row's 24 products to its mixes: two gates for each stream, and sixteen numbers that Sinkhorn balances.

A row is a scalar or an element of a vector: every row is balanced within one thread, without a sum across threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cedar.kernels.triton.device import INTERPRETED

_EXACT = tl.constexpr(INTERPRETED)


@triton.jit
def logit_terms(output, scale_ptr, base_ptr):
    """What a product of some outputs is multiplied by, beside the inverse of the streams' size, and what is added."""
    scale = tl.load(scale_ptr + tl.where(output < 4, 0, tl.where(output < 8, 1, 2)))
    return scale, tl.load(base_ptr + output, mask=output < 24, other=0.0)


@triton.jit
def store_gates(logit, output, row, known, premix_ptr, post_ptr, eps):
    """Outputs 0..3 are a row's pre-mix, 4..7 its post."""
    gate = tl.sigmoid(logit)
    tl.store(premix_ptr + row * 4 + output, gate + eps, mask=known & (output < 4))
    tl.store(post_ptr + row * 4 + output - 4, 2.0 * gate, mask=known & (output >= 4) & (output < 8))


@triton.jit
def store_logits(logit, output, row, known, mixing_ptr):
    """Outputs 8..23, for `balance`."""
    tl.store(mixing_ptr + row * 16 + output - 8, logit, mask=known & (output >= 8) & (output < 24))


@triton.jit
def _reciprocal(x):
    """Within one unit in the last place."""
    if _EXACT:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _total(a, b, c, d, eps):
    return (a + b) + (c + (d + eps))


@triton.jit
def _divide(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, eps):
    """Four times four numbers, each four over their sum.

    The four reciprocals come from one, as a thread gets them one by one; no product of four sums leaves float32.
    """
    a, b = _total(a0, a1, a2, a3, eps), _total(b0, b1, b2, b3, eps)
    c, d = _total(c0, c1, c2, c3, eps), _total(d0, d1, d2, d3, eps)
    ab, cd = a * b, c * d
    inverse = _reciprocal(ab * cd)
    a, b, c, d = b * cd * inverse, a * cd * inverse, ab * d * inverse, ab * c * inverse
    return (
        a0 * a, a1 * a, a2 * a, a3 * a, b0 * b, b1 * b, b2 * b, b3 * b,
        c0 * c, c1 * c, c2 * c, c3 * c, d0 * d, d1 * d, d2 * d, d3 * d,
    )  # fmt: skip


@triton.jit
def _softmax(a, b, c, d, eps):
    peak = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - peak), tl.exp(b - peak), tl.exp(c - peak), tl.exp(d - peak)
    inverse = _reciprocal(_total(a, b, c, d, 0.0))
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _load_four(place, known):
    return (
        tl.load(place, mask=known, other=0.0),
        tl.load(place + 1, mask=known, other=0.0),
        tl.load(place + 2, mask=known, other=0.0),
        tl.load(place + 3, mask=known, other=0.0),
    )


@triton.jit
def _store_four(place, known, a, b, c, d):
    tl.store(place, a, mask=known)
    tl.store(place + 1, b, mask=known)
    tl.store(place + 2, c, mask=known)
    tl.store(place + 3, d, mask=known)


@triton.jit
def balance(mixing_ptr, row, known, eps, ITERATIONS: tl.constexpr):
    """Rows' sixteen logits, where `store_logits` left them, to their mixing."""
    cell = mixing_ptr + row * 16
    tl.debug_barrier()
    a0, a1, a2, a3 = _load_four(cell, known)
    b0, b1, b2, b3 = _load_four(cell + 4, known)
    c0, c1, c2, c3 = _load_four(cell + 8, known)
    d0, d1, d2, d3 = _load_four(cell + 12, known)
    a0, a1, a2, a3 = _softmax(a0, a1, a2, a3, eps)
    b0, b1, b2, b3 = _softmax(b0, b1, b2, b3, eps)
    c0, c1, c2, c3 = _softmax(c0, c1, c2, c3, eps)
    d0, d1, d2, d3 = _softmax(d0, d1, d2, d3, eps)
    a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3 = _divide(
        a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3, eps
    )
    for _ in range(ITERATIONS - 1):
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = _divide(
            a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, eps
        )
        a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3 = _divide(
            a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3, eps
        )
    # nobody may still read what is now overwritten
    tl.debug_barrier()
    _store_four(cell, known, a0, a1, a2, a3)
    _store_four(cell + 4, known, b0, b1, b2, b3)
    _store_four(cell + 8, known, c0, c1, c2, c3)
    _store_four(cell + 12, known, d0, d1, d2, d3)
