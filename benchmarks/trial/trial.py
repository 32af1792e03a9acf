import torch, triton, triton.language as tl
from cedar.kernels.triton.chain import AHEAD, follow
from cedar.kernels.triton.device import INTERPRETED
from cedar.kernels.triton.stored import e4m3_half, e8m0_value


@triton.jit(do_not_specialize=["num_rows", "steps_a_share"])
def _split(
    x_ptr, codes_ptr, scales_ptr, y_ptr, partial_ptr, count_ptr, num_rows, row_stride, group_stride, channels, outputs, steps_a_share,
    SHARES: tl.constexpr, OPERAND: tl.constexpr, P: tl.constexpr, B: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    LAST: tl.constexpr,
):
    """W warps side by side, each with its own channels: warp w takes steps w, w + W, ..."""
    follow()
    tiles = tl.cdiv(outputs, B)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    num_groups = tl.num_programs(0) // tiles
    row = tl.program_id(1) * P + tl.arange(0, P)
    share = tl.program_id(2)
    inner = tl.arange(0, B)
    output = tile * B + inner
    warp = tl.arange(0, W)
    all_steps = channels // 128
    first = share * steps_a_share
    last = tl.minimum(first + steps_a_share, all_steps)
    channel = warp[:, None, None] * 128 + tl.arange(0, 32)[None, None, :]
    codes_ptr += (group * outputs + tile * B).to(tl.int64) * channels
    w_row = codes_ptr.to(tl.pointer_type(tl.float8e4nv)) + inner[None, :, None] * channels + channel
    x_row = x_ptr + group * group_stride + (row * row_stride)[None, :, None] + channel
    words: tl.constexpr = tl.pointer_type(tl.int32)
    known_row, known_output = row < num_rows, output < outputs
    scale_row = scales_ptr.to(words) + (group * (outputs // 32) + tile * (B // 32)) * all_steps + warp
    total = tl.zeros([W, B, P], tl.float32)
    scale = tl.load(scale_row + first, mask=first + warp < last, other=0)
    if B == 64:
        scale_two = tl.load(scale_row + all_steps + first, mask=first + warp < last, other=0)
    for step in tl.range(first, last, W, num_stages=STAGES):
        live = step + warp < last
        then = step + W + warp < last
        next_scale = tl.load(scale_row + step + W, mask=then, other=0)
        if B == 64:
            next_two = tl.load(scale_row + all_steps + step + W, mask=then, other=0)
        for part in tl.static_range(4):
            w = tl.load(w_row + step * 128 + part * 32, mask=known_output[None, :, None] & live[:, None, None], other=0.0)
            x = tl.load(x_row + step * 128 + part * 32, mask=known_row[None, :, None] & live[:, None, None], other=0.0)
            product = tl.dot(w.to(OPERAND), tl.permute(x.to(OPERAND), (0, 2, 1)))
            factor = e8m0_value(scale >> (8 * part) & 0xFF)[:, None, None]
            if B == 64:
                factor = tl.where(inner[None, :, None] < 32, factor, e8m0_value(scale_two >> (8 * part) & 0xFF)[:, None, None])
            total += product * factor
        scale = next_scale
        if B == 64:
            scale_two = next_two
    y = tl.trans(tl.sum(total, axis=0))
    target = (row[:, None].to(tl.int64) * num_groups + group) * outputs + output[None, :]
    inside = known_row[:, None] & known_output[None, :]
    if SHARES == 1:
        tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        size = num_rows * num_groups * outputs
        tl.store(partial_ptr + share * size + target, y, mask=inside)
        if LAST:
            tl.debug_barrier()
            counter = count_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(counter, 1, sem="acq_rel") == SHARES - 1:
                tl.store(counter, 0)
                y = tl.zeros([P, B], tl.float32)
                for other in tl.static_range(SHARES):
                    y += tl.load(partial_ptr + other * size + target, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(y_ptr + target, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add(partial_ptr, y_ptr, size, SHARES: tl.constexpr, B: tl.constexpr):
    follow()
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for share in tl.static_range(SHARES):
        total += tl.load(partial_ptr + share * size + place, mask=place < size, other=0.0)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=place < size)


COUNT = {}


def split(x, codes, scales, P, B, W, stages, shares, last=True):
    (T, G, I), O = x.shape, codes.shape[1]
    steps = I // 128
    each = triton.cdiv(triton.cdiv(steps, shares), W) * W
    shares = triton.cdiv(steps, each)
    y = torch.empty(T, G, O, device=x.device, dtype=torch.bfloat16)
    partial = torch.empty(shares, T, G, O, device=x.device) if shares > 1 else y
    if x.device not in COUNT:
        COUNT[x.device] = torch.zeros(65536, dtype=torch.int32, device=x.device)
    grid = G * triton.cdiv(O, B), triton.cdiv(T, P), shares
    binary = _split[grid](
        x, codes, scales, y, partial, COUNT[x.device], T, x.stride(0), x.stride(1), I, O, each, SHARES=shares,
        OPERAND=tl.float32 if INTERPRETED else tl.float16, P=P, B=B, W=W, STAGES=stages, LAST=last,
        num_warps=W, num_stages=stages, launch_pdl=AHEAD,
    )
    if shares > 1 and not last:
        _add[(triton.cdiv(y.numel(), 512),)](partial, y, y.numel(), SHARES=shares, B=512, launch_pdl=AHEAD)
    return y
