import torch, triton, triton.language as tl
from cedar.kernels.triton.chain import AHEAD, announce, follow, wait
from cedar.kernels.triton.device import INTERPRETED
from cedar.kernels.triton.stored import e4m3_half, e8m0_value

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _four(word):
    """int32 of four E4M3 codes -> four float32."""
    if _INTERPRETED:
        a, b = e4m3_half((word & 0xFF).to(tl.uint8)).to(tl.float32), e4m3_half((word >> 8 & 0xFF).to(tl.uint8)).to(tl.float32)
        c, d = e4m3_half((word >> 16 & 0xFF).to(tl.uint8)).to(tl.float32), e4m3_half((word >> 24 & 0xFF).to(tl.uint8)).to(tl.float32)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, p, q;
            .reg .b32 pair;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {p, q}, pair;
            cvt.f32.f16 $0, p;
            cvt.f32.f16 $1, q;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {p, q}, pair;
            cvt.f32.f16 $2, p;
            cvt.f32.f16 $3, q;
            }""",
            "=f,=f,=f,=f,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )
    return a, b, c, d


@triton.jit(do_not_specialize=["steps_a_share"])
def _vector(
    x_ptr, codes_ptr, scales_ptr, y_ptr, partial_ptr, count_ptr, group_stride, channels, outputs, steps_a_share,
    SHARES: tl.constexpr, K: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):
    """One row: 32 outputs, K channels a step, D steps asked for ahead; no tensor cores."""
    announce()
    tiles = outputs // 32
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    share = tl.program_id(2)
    first = share * steps_a_share
    last = tl.minimum(first + steps_a_share, tl.cdiv(channels, K))
    inner, channel, quad = tl.arange(0, 32), tl.arange(0, K), tl.arange(0, K // 4)
    part = tl.arange(0, K // 32)
    codes_ptr += (group * outputs + tile * 32).to(tl.int64) * channels
    w_row = codes_ptr.to(tl.pointer_type(tl.int32)) + inner[:, None] * (channels // 4) + quad[None, :]
    scale_row = scales_ptr + (group * tiles + tile) * (channels // 32) + part
    x_row = x_ptr + group * group_stride + channel
    total = tl.zeros([32, K // 4], tl.float32)
    if not EARLY:
        wait()
    w = tl.load(w_row + first * (K // 4), mask=(first * (K // 4) + quad < channels // 4)[None, :], other=0)
    if D == 2:
        w2 = tl.load(w_row + (first + 1) * (K // 4), mask=((first + 1) * (K // 4) + quad < channels // 4)[None, :] & (first + 1 < last), other=0)
    if EARLY:
        wait()
    for step in tl.range(first, last, num_stages=1):
        x = tl.load(x_row + step * K, mask=step * K + channel < channels, other=0.0).to(tl.float32)
        scale = e8m0_value(tl.load(scale_row + step * (K // 32), mask=step * K + part * 32 < channels, other=0))
        then = step + D
        next_w = tl.load(w_row + then * (K // 4), mask=(then * (K // 4) + quad < channels // 4)[None, :] & (then < last), other=0)
        x = tl.reshape(tl.reshape(x, (K // 32, 32)) * scale[:, None], (K,))
        x02, x13 = tl.split(tl.reshape(x, (K // 4, 2, 2)))
        x0, x2 = tl.split(x02)
        x1, x3 = tl.split(x13)
        a, b, c, d = _four(w)
        total += a * x0[None, :]
        total += b * x1[None, :]
        total += c * x2[None, :]
        total += d * x3[None, :]
        if D == 2:
            w = w2
            w2 = next_w
        else:
            w = next_w
    y = tl.sum(total, axis=1)
    target = group * outputs + tile * 32 + inner
    if SHARES == 1:
        tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty))
    else:
        size = outputs * (tl.num_programs(0) // tiles)
        tl.store(partial_ptr + share * size + target, y)
        tl.debug_barrier()
        counter = count_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SHARES - 1:
            tl.store(counter, 0)
            y = tl.zeros([32], tl.float32)
            for other in tl.static_range(SHARES):
                y += tl.load(partial_ptr + other * size + target, cache_modifier=".cg")
            tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty))


COUNT = {}


def vector(x, codes, scales, K, D, warps, shares, early=False):
    (T, G, I), O = x.shape, codes.shape[1]
    steps = triton.cdiv(I, K)
    each = triton.cdiv(steps, shares)
    shares = triton.cdiv(steps, each)
    y = torch.empty(T, G, O, device=x.device, dtype=torch.bfloat16)
    partial = torch.empty(shares, T, G, O, device=x.device) if shares > 1 else y
    if x.device not in COUNT:
        COUNT[x.device] = torch.zeros(65536, dtype=torch.int32, device=x.device)
    _vector[(G * O // 32, 1, shares)](
        x, codes, scales, y, partial, COUNT[x.device], x.stride(1), I, O, each, SHARES=shares, K=K, D=D, EARLY=early,
        num_warps=warps, launch_pdl=AHEAD,
    )
    return y
