import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from cedar.kernels.triton import packed_linear as main_kernel
from cedar.kernels.triton.chain import AHEAD


@gluon.jit
def _power(byte):
    return (byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _keep(x, xs, P: gl.constexpr):
    """Rows in float16, each sixteen channels in the order in which a thread's bytes of a weight come."""
    x = gl.reshape(x.to(gl.float16), [P, 2, 4, 2, 2])
    xs.store(gl.reshape(gl.permute(x, [0, 1, 3, 2, 4]), [P, 32]))


@gluon.jit
def _codes(ring, part: gl.constexpr, B: gl.constexpr, BYTES: gl.constexpr, LEFT: gl.constexpr):
    w = ring.slice(32 * part, 32, dim=1).load(BYTES).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    w = gl.permute(gl.reshape(w, [B, 2, 4, 2, 2]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(w, [B, 32]), LEFT, assert_trivial=True)


@gluon.jit(do_not_specialize=["num_rows", "steps_a_share"])
def _wide(
    w_desc, x_ptr, scales_ptr, y_ptr, partial_ptr, count_ptr, num_rows, row_stride, group_stride, channels, outputs, steps_a_share,
    SHARES: gl.constexpr, P: gl.constexpr, B: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, LAST: gl.constexpr,
):
    """Four warps: B outputs for P rows over a share of the channels."""
    gdc_launch_dependents()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BYTES: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    XS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, B, 128], w_desc.layout)
    xs = gl.allocate_shared_memory(gl.float16, [8, P, 32], XS)
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
        there = first + i < last
        mbarrier.expect(full.index(i), B * 128, pred=there)
        tma.async_copy_global_to_shared(w_desc, [w_row, (first + i) * 128], full.index(i), ring.index(i), pred=there)
    output = tile * B + gl.arange(0, B, layout=gl.SliceLayout(1, MMA))
    words: gl.constexpr = gl.pointer_type(gl.int32)
    scale_row = scales_ptr.to(words) + (group * (outputs // 32) + output // 32) * all_steps
    scale = gl.load(scale_row + first, mask=output < outputs, other=0)
    if EARLY:
        gdc_wait()
    row = gl.program_id(1) * P + gl.arange(0, P, layout=gl.SliceLayout(1, ROWS))
    channel = gl.arange(0, 32, layout=gl.SliceLayout(0, ROWS))
    known = gl.expand_dims(row < num_rows, 1)
    x_row = x_ptr + group * group_stride + gl.expand_dims(row * row_stride, 1) + gl.expand_dims(channel, 0)
    total = gl.zeros([B, P], gl.float32, MMA)
    slot = 0
    phase = 0
    buffer = 0
    x0 = gl.load(x_row + first * 128, mask=known, other=0.0)
    x1 = gl.load(x_row + first * 128 + 32, mask=known, other=0.0)
    x2 = gl.load(x_row + first * 128 + 64, mask=known, other=0.0)
    x3 = gl.load(x_row + first * 128 + 96, mask=known, other=0.0)
    for step in range(first, last):
        _keep(x0, xs.index(buffer), P)
        _keep(x1, xs.index(buffer + 1), P)
        _keep(x2, xs.index(buffer + 2), P)
        _keep(x3, xs.index(buffer + 3), P)
        following = gl.minimum(step + 1, all_steps - 1)
        x0 = gl.load(x_row + following * 128, mask=known, other=0.0)
        x1 = gl.load(x_row + following * 128 + 32, mask=known, other=0.0)
        x2 = gl.load(x_row + following * 128 + 64, mask=known, other=0.0)
        x3 = gl.load(x_row + following * 128 + 96, mask=known, other=0.0)
        next_scale = gl.load(scale_row + following, mask=output < outputs, other=0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(full.index(slot), phase)
        w = _codes(ring.index(slot), 0, B, BYTES, LEFT)
        zero = gl.zeros([B, P], gl.float32, MMA)
        product = warpgroup_mma(w, xs.index(buffer).permute([1, 0]), zero, use_acc=False, is_async=True)
        for part in gl.static_range(1, 4):
            # the next codes are widened while the product before is under way
            other = _codes(ring.index(slot), part, B, BYTES, LEFT)
            product, w = warpgroup_mma_wait(0, deps=[product, w])
            done = product
            zero = gl.zeros([B, P], gl.float32, MMA)
            product = warpgroup_mma(other, xs.index(buffer + part).permute([1, 0]), zero, use_acc=False, is_async=True)
            w = other
            total += done * gl.expand_dims(_power((scale >> (8 * part - 8)) & 0xFF), 1)
        if True:
            # every warp has read the slot
            gl.thread_barrier()
            there = step + STAGES < last
            mbarrier.expect(full.index(slot), B * 128, pred=there)
            tma.async_copy_global_to_shared(
                w_desc, [w_row, (step + STAGES) * 128], full.index(slot), ring.index(slot), pred=there
            )
        product, w = warpgroup_mma_wait(0, deps=[product, w])
        total += product * gl.expand_dims(_power((scale >> 24) & 0xFF), 1)
        scale = next_scale
        buffer = 4 - buffer
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    row = gl.expand_dims(gl.program_id(1) * P + gl.arange(0, P, layout=gl.SliceLayout(0, MMA)), 0)
    output = gl.expand_dims(output, 1)
    target = (row.to(gl.int64) * num_groups + group) * outputs + output
    inside = (row < num_rows) & (output < outputs)
    if SHARES == 1:
        gl.store(y_ptr + target, total.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        size = num_rows * num_groups * outputs
        gl.store(partial_ptr + share * size + target, total, mask=inside)
        if LAST:
            gl.thread_barrier()
            counter = count_ptr + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
            if gl.atomic_add(counter, 1, sem="acq_rel") == SHARES - 1:
                gl.store(counter, 0)
                total = gl.zeros([B, P], gl.float32, MMA)
                for other in gl.static_range(SHARES):
                    total += gl.load(partial_ptr + other * size + target, mask=inside, other=0.0, cache_modifier=".cg")
                gl.store(y_ptr + target, total.to(y_ptr.dtype.element_ty), mask=inside)


COUNT = {}
LAYOUT = gl.NVMMASharedLayout(128, 8, 2)


def wide(x, codes, scales, P, B, stages, shares, early=True, last=True):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    (T, G, I), O = x.shape, codes.shape[1]
    steps = I // 128
    each = triton.cdiv(steps, shares)
    shares = triton.cdiv(steps, each)
    y = torch.empty(T, G, O, device=x.device, dtype=torch.bfloat16)
    partial = torch.empty(shares, T, G, O, device=x.device) if shares > 1 else y
    if x.device not in COUNT:
        COUNT[x.device] = torch.zeros(65536, dtype=torch.int32, device=x.device)
    grid = G * triton.cdiv(O, B), triton.cdiv(T, P), shares
    desc = TensorDescriptor(codes, [G * O, I], [I, 1], [B, 128], LAYOUT)
    _wide[grid](
        desc, x, scales, y, partial, COUNT[x.device], T, x.stride(0), x.stride(1), I, O, each, SHARES=shares,
        P=P, B=B, STAGES=stages, EARLY=early, LAST=last, num_warps=4, launch_pdl=AHEAD,
    )
    if shares > 1 and not last:
        size = y.numel()
        main_kernel._add_shares[(triton.cdiv(size, 512),)](
            partial, y, size, SHARES=shares, ROUNDED=False, B=512, launch_pdl=AHEAD
        )
    return y
