import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from cedar.kernels.triton import packed_linear as main_kernel
from cedar.kernels.triton.chain import AHEAD


@gluon.jit
def _power(byte):
    return (byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _row_parts(x_row, known):
    return (
        gl.load(x_row, mask=known, other=0.0), gl.load(x_row + 32, mask=known, other=0.0),
        gl.load(x_row + 64, mask=known, other=0.0), gl.load(x_row + 96, mask=known, other=0.0),
    )


@gluon.jit(do_not_specialize=["num_rows", "steps_a_share"])
def _deep3(
    w_desc, x_ptr, scales_ptr, y_ptr, partial_ptr, count_ptr, num_rows, row_stride, group_stride, channels, outputs, steps_a_share,
    SHARES: gl.constexpr, P: gl.constexpr, B: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, X: gl.constexpr, LAST: gl.constexpr,
):
    """B outputs for P rows over a share of the channels; of each W * 128 channels of a step a warp has 128."""
    gdc_launch_dependents()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, W, B, 128], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    tiles = gl.cdiv(outputs, B)
    group, tile = gl.program_id(0) // tiles, gl.program_id(0) % tiles
    num_groups = gl.num_programs(0) // tiles
    share = gl.program_id(2)
    all_steps = channels // 128
    first = share * steps_a_share
    last = gl.minimum(first + steps_a_share, all_steps)
    w_row = group * outputs + tile * B
    if not EARLY:
        gdc_wait()
    for i in gl.static_range(STAGES):
        there = first + i * W < last
        mbarrier.expect(full.index(i), W * B * 128, pred=there)
        tma.async_copy_global_to_shared(w_desc, [first + i * W, w_row, 0], full.index(i), ring.index(i), pred=there)
    words: gl.constexpr = gl.pointer_type(gl.int32)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    scale_row = scales_ptr.to(words) + (group * (outputs // 32) + tile * B // 32) * all_steps + warp
    scale = gl.load(scale_row + first, mask=first + warp < last, other=0)
    two = scale
    if B == 64:
        two = gl.load(scale_row + all_steps + first, mask=first + warp < last, other=0)
    if EARLY:
        gdc_wait()
    row = gl.program_id(1) * P + gl.arange(0, P, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))
    channel = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    part_of = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    part_of = gl.expand_dims(gl.expand_dims(part_of, 1), 2)
    row = gl.expand_dims(gl.expand_dims(row, 0), 1)
    channel = gl.expand_dims(gl.expand_dims(channel, 0), 2)
    x_row = x_ptr + group * group_stride + row * row_stride + (part_of * 128 + channel)
    known = row < num_rows
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA))), 0), 2)
    total = gl.zeros([W, B, P], gl.float32, MMA)
    slot = 0
    phase = 0
    # X 2: x asked for a step early; 1: before the wait for the weights; 0: part by part
    if X == 2:
        n0, n1, n2, n3 = _row_parts(x_row + first * 128, known & (first + part_of < last))
    for step in range(first, last, W):
        following = step + W
        then = following + warp < last
        next_scale = gl.load(scale_row + following, mask=then, other=0)
        next_two = next_scale
        if B == 64:
            next_two = gl.load(scale_row + all_steps + following, mask=then, other=0)
        live = known & (step + part_of < last)
        if X == 2:
            x0, x1, x2, x3 = n0, n1, n2, n3
            n0, n1, n2, n3 = _row_parts(x_row + following * 128, known & (following + part_of < last))
        elif X == 1:
            x0, x1, x2, x3 = _row_parts(x_row + step * 128, live)
        mbarrier.wait(full.index(slot), phase)
        for part in gl.static_range(4):
            if X == 0:
                x = gl.load(x_row + step * 128 + 32 * part, mask=live, other=0.0)
            else:
                x = x0 if part == 0 else x1 if part == 1 else x2 if part == 2 else x3
            w = ring.index(slot).slice(32 * part, 32, dim=2).load(LEFT).to(gl.float8e4nv, bitcast=True)
            product = mma_v2(w.to(gl.float16), x.to(gl.float16), gl.zeros([W, B, P], gl.float32, MMA))
            factor = gl.expand_dims(gl.expand_dims(_power((scale >> (8 * part)) & 0xFF), 1), 2)
            if B == 64:
                other = gl.expand_dims(gl.expand_dims(_power((two >> (8 * part)) & 0xFF), 1), 2)
                total += product * gl.where(inner < 32, factor, other)
            else:
                total += product * factor
        scale = next_scale
        two = next_two
        # every warp has read the slot
        gl.thread_barrier()
        ahead = step + STAGES * W
        there = ahead < last
        mbarrier.expect(full.index(slot), W * B * 128, pred=there)
        tma.async_copy_global_to_shared(w_desc, [ahead, w_row, 0], full.index(slot), ring.index(slot), pred=there)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    sums = gl.sum(total, axis=0)
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, W], [0, 1])
    sums = gl.convert_layout(sums, SUMS)
    row = gl.expand_dims(gl.program_id(1) * P + gl.arange(0, P, layout=gl.SliceLayout(0, SUMS)), 0)
    output = tile * B + gl.expand_dims(gl.arange(0, B, layout=gl.SliceLayout(1, SUMS)), 1)
    target = (row.to(gl.int64) * num_groups + group) * outputs + output
    inside = (row < num_rows) & (output < outputs)
    if SHARES == 1:
        gl.store(y_ptr + target, sums.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        size = num_rows * num_groups * outputs
        gl.store(partial_ptr + share * size + target, sums, mask=inside)
        if LAST:
            gl.thread_barrier()
            counter = count_ptr + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
            if gl.atomic_add(counter, 1, sem="acq_rel") == SHARES - 1:
                gl.store(counter, 0)
                sums = gl.zeros([B, P], gl.float32, SUMS)
                for other in gl.static_range(SHARES):
                    sums += gl.load(partial_ptr + other * size + target, mask=inside, other=0.0, cache_modifier=".cg")
                gl.store(y_ptr + target, sums.to(y_ptr.dtype.element_ty), mask=inside)


COUNT = {}
LAYOUT = gl.NVMMASharedLayout(128, 8, 3)


def deep3(x, codes, scales, P, B, W, stages, shares, early=True, X=1, last=True):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    (T, G, I), O = x.shape, codes.shape[1]
    steps = I // 128
    each = triton.cdiv(triton.cdiv(steps, shares), W) * W
    shares = triton.cdiv(steps, each)
    y = torch.empty(T, G, O, device=x.device, dtype=torch.bfloat16)
    partial = torch.empty(shares, T, G, O, device=x.device) if shares > 1 else y
    if x.device not in COUNT:
        COUNT[x.device] = torch.zeros(65536, dtype=torch.int32, device=x.device)
    grid = G * triton.cdiv(O, B), triton.cdiv(T, P), shares
    desc = TensorDescriptor(codes, [steps, G * O, 128], [128, I, 1], [W, B, 128], LAYOUT)
    _deep3[grid](
        desc, x, scales, y, partial, COUNT[x.device], T, x.stride(0), x.stride(1), I, O, each, SHARES=shares,
        P=P, B=B, W=W, STAGES=stages, EARLY=early, X=X, LAST=last, num_warps=W, launch_pdl=AHEAD,
    )
    if shares > 1 and not last:
        size = y.numel()
        main_kernel._add_shares[(triton.cdiv(size, 512),)](
            partial, y, size, SHARES=shares, ROUNDED=False, B=512, launch_pdl=AHEAD
        )
    return y
