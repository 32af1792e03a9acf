import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from cedar.kernels.triton.chain import AHEAD


@gluon.jit
def _widen(word):
    """Words of four E4M3 codes -> four float32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, first, second;
        .reg .b32 pair;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {first, second}, pair;
        cvt.f32.f16 $0, first;
        cvt.f32.f16 $1, second;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {first, second}, pair;
        cvt.f32.f16 $2, first;
        cvt.f32.f16 $3, second;
        }""",
        "=f,=f,=f,=f,r",
        [word],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _channels(four, scale):
    """int64 of four bfloat16, times the scale: four float32."""
    low, high = four.to(gl.int32), (four >> 32).to(gl.int32)
    a, b = (low << 16).to(gl.float32, bitcast=True), (low & -65536).to(gl.float32, bitcast=True)
    c, d = (high << 16).to(gl.float32, bitcast=True), (high & -65536).to(gl.float32, bitcast=True)
    return a * scale, b * scale, c * scale, d * scale


@gluon.jit
def _round_group(y):
    """The 32 of a group of FP8 as they read back: `quantize.round_groups`."""
    exponent = (gl.maximum(gl.max(gl.abs(y), axis=0), 1e-4) * (1.0 / 448.0)).to(gl.int32, bitcast=True)
    exponent = (exponent + 0x007FFFFF) & 0x7F800000
    x = y * (0x7F000000 - exponent).to(gl.float32, bitcast=True)
    bits = gl.maximum(x.to(gl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    shift = bits.to(gl.float32, bitcast=True) * 1572864.0
    return ((x + shift) - shift) * exponent.to(gl.float32, bitcast=True)


@gluon.jit
def _keep(y_ptr, y, ROUNDED: gl.constexpr):
    y = y.to(gl.bfloat16)
    if ROUNDED:
        y = _round_group(y.to(gl.float32)).to(gl.bfloat16)
    gl.store(y_ptr, y)


@gluon.jit(do_not_specialize=["steps_a_share"])
def _one(
    x_ptr, codes_ptr, scales_ptr, y_ptr, partial_ptr, arrived_ptr, row_stride, group_stride, channels, outputs, steps_a_share,
    ROWS: gl.constexpr, SHARES: gl.constexpr, ROUNDED: gl.constexpr, B: gl.constexpr, L: gl.constexpr,
    DOWN: gl.constexpr, ALONG: gl.constexpr, D: gl.constexpr, EARLY: gl.constexpr,
):
    """B outputs of one or two rows over a share of the channels; a thread has 16 channels of some outputs a step."""
    gdc_launch_dependents()
    K: gl.constexpr = 16 * L * ALONG
    HELD: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32 // L, L, 1], [DOWN, ALONG, 1], [2, 1, 0])
    X: gl.constexpr = gl.SliceLayout(0, HELD)
    tiles = outputs // B
    group, tile = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    share = gl.program_id(1)
    first = share * steps_a_share
    last = gl.minimum(first + steps_a_share, gl.cdiv(channels, K))
    inner = gl.arange(0, B, layout=gl.SliceLayout(1, gl.SliceLayout(2, HELD)))
    sixteen = gl.arange(0, K // 16, layout=gl.SliceLayout(1, X))
    place = gl.expand_dims(sixteen * 4, 1) + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, X)), 0)
    inside = gl.expand_dims(sixteen * 16, 1) + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, X)), 0) * 0
    codes_ptr += (group * outputs + tile * B).to(gl.int64) * channels
    w_row = codes_ptr.to(gl.pointer_type(gl.int32)) + gl.expand_dims(gl.expand_dims(inner * (channels // 4), 1), 2)
    w_row += gl.expand_dims(place, 0)
    x_row = (x_ptr + group * group_stride).to(gl.pointer_type(gl.int64)) + place
    scale_row = scales_ptr + (group * (outputs // 32) + tile * B // 32) * (channels // 32) + sixteen // 2
    if not EARLY:
        gdc_wait()
    there = (first * K + inside < channels) & (first < last)
    w0 = gl.load(w_row + first * (K // 4), mask=gl.expand_dims(there, 0), other=0)
    w1 = w0
    w2 = w0
    if D > 1:
        there = ((first + 1) * K + inside < channels) & (first + 1 < last)
        w1 = gl.load(w_row + (first + 1) * (K // 4), mask=gl.expand_dims(there, 0), other=0)
    if D > 2:
        there = ((first + 2) * K + inside < channels) & (first + 2 < last)
        w2 = gl.load(w_row + (first + 2) * (K // 4), mask=gl.expand_dims(there, 0), other=0)
    if EARLY:
        gdc_wait()
    one = gl.zeros([B, K // 16, 4], gl.float32, HELD)
    two = gl.zeros([B, K // 16, 4], gl.float32, HELD)
    for start in range(first, last, D):
        for j in gl.static_range(D):
            step = start + j
            there = (step * K + inside < channels) & (step < last)
            known = (step * K + sixteen * 16 < channels) & (step < last)
            byte = gl.load(scale_row + step * (K // 32), mask=known, other=0)
            four = gl.load(x_row + step * (K // 4), mask=there, other=0)
            scale = gl.expand_dims((byte.to(gl.int32) << 23).to(gl.float32, bitcast=True), 1)
            w = w0 if j == 0 else w1 if j == 1 else w2
            a, b, c, d = _widen(w)
            ahead = step + D
            there = (ahead * K + inside < channels) & (ahead < last)
            w = gl.load(w_row + ahead * (K // 4), mask=gl.expand_dims(there, 0), other=0)
            if j == 0:
                w0 = w
            elif j == 1:
                w1 = w
            else:
                w2 = w
            x0, x1, x2, x3 = _channels(four, scale)
            one += a * gl.expand_dims(x0, 0)
            one += b * gl.expand_dims(x1, 0)
            one += c * gl.expand_dims(x2, 0)
            one += d * gl.expand_dims(x3, 0)
            if ROWS == 2:
                there = (step * K + inside < channels) & (step < last)
                four = gl.load(x_row + row_stride // 4 + step * (K // 4), mask=there, other=0)
                x0, x1, x2, x3 = _channels(four, scale)
                two += a * gl.expand_dims(x0, 0)
                two += b * gl.expand_dims(x1, 0)
                two += c * gl.expand_dims(x2, 0)
                two += d * gl.expand_dims(x3, 0)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [DOWN * ALONG], [0])
    output = tile * B + gl.arange(0, B, layout=LINE)
    num_groups = gl.num_programs(0) // tiles
    stride = num_groups * outputs
    y_ptr += group * outputs + output
    y = gl.convert_layout(gl.sum(gl.sum(one, axis=2), axis=1), LINE)
    if ROWS == 2:
        other = gl.convert_layout(gl.sum(gl.sum(two, axis=2), axis=1), LINE)
    else:
        other = y
    if SHARES == 1:
        _keep(y_ptr, y, ROUNDED)
        if ROWS == 2:
            _keep(y_ptr + stride, other, ROUNDED)
    else:
        partial_ptr += group * outputs + output
        gl.store(partial_ptr + share * ROWS * stride, y)
        if ROWS == 2:
            gl.store(partial_ptr + (share * ROWS + 1) * stride, other)
        gl.thread_barrier()
        arrived_ptr += gl.program_id(0)
        if gl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SHARES - 1:
            gl.store(arrived_ptr, 0)
            y = gl.zeros([B], gl.float32, LINE)
            for part in gl.static_range(SHARES):
                y += gl.load(partial_ptr + part * ROWS * stride, cache_modifier=".cg")
            _keep(y_ptr, y, ROUNDED)
            if ROWS == 2:
                y = gl.zeros([B], gl.float32, LINE)
                for part in gl.static_range(SHARES):
                    y += gl.load(partial_ptr + (part * ROWS + 1) * stride, cache_modifier=".cg")
                _keep(y_ptr + stride, y, ROUNDED)


COUNT = {}


def one(x, codes, scales, B, L, DOWN, ALONG, D, shares, early=False, rounded=False):
    (T, G, I), O = x.shape, codes.shape[1]
    K = 16 * L * ALONG
    steps = triton.cdiv(I, K)
    each = triton.cdiv(steps, shares)
    shares = triton.cdiv(steps, each)
    y = torch.empty(T, G, O, device=x.device, dtype=torch.bfloat16)
    partial = torch.empty(shares, T, G, O, device=x.device) if shares > 1 else y
    if x.device not in COUNT:
        COUNT[x.device] = torch.zeros(65536, dtype=torch.int32, device=x.device)
    _one[(G * O // B, shares)](
        x, codes, scales, y, partial, COUNT[x.device], x.stride(0), x.stride(1), I, O, each, ROWS=T, SHARES=shares, ROUNDED=rounded,
        B=B, L=L, DOWN=DOWN, ALONG=ALONG, D=D, EARLY=early, num_warps=DOWN * ALONG, launch_pdl=AHEAD,
    )
    return y
