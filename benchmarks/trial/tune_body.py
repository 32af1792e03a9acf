import os, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
WORK = "/tmp/cedar_trial_dense"
os.makedirs(WORK, exist_ok=True)
for _name, _text in SOURCES.items():
    _path = os.path.join(WORK, _name + ".py")
    if not os.path.exists(_path) or open(_path).read() != _text:
        _new = _path + f".{os.getpid()}"
        open(_new, "w").write(_text)
        os.replace(_new, _path)
sys.path.insert(0, WORK)
import cedar
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(cedar.__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "benchmarks")]
import torch, triton, triton.language as tl
from cedar.formats import fp8
from cedar.formats.spec import FP8
from cedar.kernels.triton import packed_linear as main_kernel
import trial_deep3 as deep3, trial_one as one, trial_vector as vector, trial_wide as wide

COMPILE = "--compile" in sys.argv
PART = next((a for a in sys.argv if a.startswith("--part=")), None)
ONLY = next((a[7:].split(",") for a in sys.argv if a.startswith("--only=")), None)
LIMIT = float(next((a[8:] for a in sys.argv if a.startswith("--limit=")), "75"))
DEVICE = "cpu" if os.environ.get("TRIAL_FAKE") else "cuda"
BEGAN = time.time()
SHAPES = {
    "wq_b": (1, 32768, 1280), "wo_b": (1, 5120, 8192), "wq_a_wkv": (1, 1792, 5120), "wo_a": (8, 1024, 4096),
    "w1_w3": (1, 4608, 5120), "w2": (1, 5120, 2304),
}


try:
    from cedar.kernels.triton import one_row
except ImportError:
    one_row = None


def old_main(x, codes, scales, spec=None):
    """The kernel of main, also where one row has another now."""
    if one_row is None:
        return main_kernel._few_rows(x, codes, scales, spec)
    runs, one_row.RUNS = one_row.RUNS, False
    try:
        return main_kernel._few_rows(x, codes, scales, spec)
    finally:
        one_row.RUNS = runs


def check_product():
    """The kernel that would land: every code and scale, rounded outputs, few channels."""
    from cedar.kernels import dense
    from cedar.kernels.dispatch import use_kernels
    from cedar.kernels.quantize import round_rows
    x = torch.eye(64, device=DEVICE, dtype=torch.bfloat16)
    codes = torch.arange(32 * 64, device=DEVICE).view(32, 64) % 127
    codes[1::2] += 128
    codes = codes.to(torch.uint8)
    for exponent in (70, 127, 190):
        tiles = torch.tensor([[exponent, 127]], dtype=torch.uint8, device=DEVICE)
        with use_kernels("reference"):
            want = dense.packed_linear(x, codes, tiles, None)
        got = torch.cat([one_row.product(x[k:k + 1], codes[None], tiles[None], False) for k in range(64)])
        print("product: codes exact", exponent, bool(torch.equal(got, want)), flush=True)
    for g, o, i in ((8, 1024, 4096), (1, 5120, 8192), (3, 96, 1184), (2, 32, 96)):
        x = torch.randn(1, g, i, device=DEVICE).to(torch.bfloat16)
        packed = [fp8.quantize_tiles(torch.randn(o, i, device=DEVICE)) for _ in range(g)]
        codes, tiles = (torch.stack(parts) for parts in zip(*packed))
        plain = torch.stack([x[:, k].double() @ fp8.dequantize_tiles(codes[k], tiles[k]).double().T for k in range(g)], 1)
        got = one_row.product(x[0], codes, tiles, False)
        rounded, again = (one_row.product(x[0], codes, tiles, True) for _ in range(2))
        with use_kernels("reference"):
            want = round_rows(got.float(), FP8)
        print("product:", g, o, i, f"error {float((got.double() - plain[0]).norm() / plain.norm()):.1e}, rounding",
              bool(torch.equal(rounded.float(), want)), "same twice", bool(torch.equal(rounded, again)), flush=True)


ONES = [
    (32, 8, 2, 1, 2, 1056), (32, 8, 2, 1, 2, 1056, True), (32, 8, 4, 1, 3, 1056), (32, 8, 2, 1, 3, 1056),
    (32, 16, 4, 1, 2, 528), (32, 8, 4, 1, 2, 1056), (32, 16, 4, 1, 3, 528), (32, 16, 8, 1, 3, 528),
    (32, 32, 8, 1, 2, 264), (32, 32, 8, 1, 1, 264), (32, 8, 2, 4, 2, 264), (32, 8, 2, 2, 2, 528),
    (16, 8, 1, 4, 2, 528), (16, 8, 1, 8, 2, 396), (16, 8, 1, 1, 2, 2112), (32, 8, 2, 1, 2, 2112), (32, 8, 2, 1, 2, 528),
    (32, 8, 2, 1, 1, 1584),
]


def variants(name, rows):
    """(label, call of (x, codes, scales)); `shares` are of the channels."""
    g, o, i = SHAPES[name]
    steps = i // 128

    def shares_for(b, per_chip, p):
        return max(1, min(steps, per_chip // (g * -(-o // b) * -(-rows // p))))

    found = []

    def add(label, call):
        if label not in [f[0] for f in found]:
            found.append((label, call))

    def add_deep(p, b, w, stages, x, per_chip, shares=None, early=False, last=True):
        s = shares or max(1, min(-(-steps // w), per_chip // (g * -(-o // b) * -(-rows // p))))
        each = -(-(-(-steps // s)) // w) * w
        s = -(-steps // each)
        add(f"deep P{p} B{b} W{w} st{stages} x{x}{' early' if early else ''} sh{s}{'' if last else ' add'}",
            lambda X, C, S: deep3.deep3(X, C, S, p, b, w, stages, s, early, x, last))

    def add_wide(p, b, stages, per_chip, early=False, last=True):
        s = shares_for(b, per_chip, p)
        s = -(-steps // -(-steps // s))
        add(f"wide P{p} B{b} st{stages} sh{s}{'' if last else ' add'}", lambda X, C, S: wide.wide(X, C, S, p, b, stages, s, early, last))

    def add_one(b, l, down, along, d, per_chip, early=False):
        k = 16 * l * along
        all_steps = -(-i // k)
        s = max(1, min(all_steps // d, per_chip // (g * o // b)))
        s = -(-all_steps // -(-all_steps // s))
        add(f"one B{b} L{l} {down}x{along} D{d} of{per_chip}{' early' if early else ''} sh{s}",
            lambda X, C, S: one.one(X, C, S, b, l, down, along, d, s, early))

    if rows == 1:
        s = max(1, min(i // 128 // 2, 1056 // (g * o // 32)))
        add(f"vector K128 D2 w2 sh{s}", lambda X, C, S, s=s: vector.vector(X, C, S, 128, 2, 2, s))
        for config in ONES:
            add_one(*config)
    if rows == 2:
        for config in ONES[:5]:
            add_one(*config)
    if rows <= 8:
        if rows > 1:
            for per_chip in (264, 132):
                add_wide(8, 128, 4, per_chip, last=False)
            add_deep(8, 32, 1, 4, 2, 1320, last=False)
            add_deep(8, 32, 2, 4, 2, 792, early=True)
            add_deep(8, 32, 2, 4, 2, 792, last=False)
            add_deep(8, 32, 4, 4, 2, 396, last=False)
    elif rows == 16 or rows == 32:
        for b, per_chip in ((128, 264), (128, 132), (64, 528), (64, 264)):
            add_wide(rows, b, 4, per_chip, last=False)
        add_wide(rows, 128, 3, 264, last=False)
    elif rows == 64:
        for b, per_chip in ((128, 264), (128, 132), (64, 264)):
            add_wide(64, b, 3, per_chip, last=False)
        add_wide(32, 128, 4, 264, last=False)
    add("main", old_main)
    if rows == 1 and one_row is not None:
        add("product", lambda X, C, S: one_row.product(X[0], C, S, False).unsqueeze(0))
    return found


def rounded_to_codes(x):
    from cedar.kernels.dispatch import use_kernels
    from cedar.kernels.quantize import round_rows
    with use_kernels("reference"):
        return round_rows(x.float(), FP8).to(x.dtype)


def describe():
    """Registers and spills of what was launched."""
    for module in (one, deep3, vector, wide):
        for kernel_name in ("_one", "_deep3", "_vector", "_wide"):
            kernel = getattr(module, kernel_name, None)
            if kernel is None:
                continue
            seen = set()
            for cache in kernel.device_caches.values():
                for k in list(cache[0].values()):
                    try:
                        seen.add((k.n_regs, k.n_spills, k.metadata.shared, k.metadata.num_warps))
                    except Exception:
                        pass
            print(kernel_name, "(registers, spills, shared, warps):", *sorted(seen))


def main():
    torch.manual_seed(0)
    if COMPILE and PART is None:
        n = min(8, max(1, (os.cpu_count() or 2) // 2))
        children = [subprocess.Popen([sys.executable, __file__, "--compile", f"--part={k}/{n}"]) for k in range(n)]
        codes = [c.wait() for c in children]
        print(f"compiled by {n}: {codes}, {time.time() - BEGAN:.0f} s", flush=True)
        return
    index, parts = (int(v) for v in PART[7:].split("/")) if PART else (0, 1)
    clock = None
    if not COMPILE:
        from kernels import Clock
        clock = Clock()
        nothing = torch.zeros(8, 32, device=DEVICE, dtype=torch.bfloat16)
        print(f"one tiny kernel {clock(lambda: main_kernel._rounded(nothing))[0]:.1f} us", flush=True)

        @triton.jit
        def read(p, out, n, B: tl.constexpr):
            total = tl.zeros([B], tl.int32)
            for at in range(tl.program_id(0) * B, n, tl.num_programs(0) * B):
                total += tl.load(p + at + tl.arange(0, B))
            tl.store(out + tl.program_id(0), tl.sum(total))

        out = torch.empty(4096, dtype=torch.int32, device=DEVICE)
        for mb in (9, 34, 42):
            b = torch.ones(mb * 10**6 // 8192 * 2048, dtype=torch.int32, device=DEVICE)
            times = [clock(lambda grid=grid: read[(grid,)](b, out, b.numel(), B=2048, num_warps=4))[0] for grid in (1056, 2112)]
            print(f"read {mb} MB: {min(times):.1f} us", flush=True)
    if one_row is not None and not COMPILE:
        try:
            check_product()
        except Exception as e:
            print("FAIL product", repr(e)[:300], flush=True)
    best_of, number, totals = {}, 0, {}
    for rows in (1, 32, 8, 2, 16, 64):
        for name, (g, o, i) in SHAPES.items():
            if ONLY and name not in ONLY and str(rows) not in ONLY:
                continue
            torch.manual_seed(rows)
            codes = torch.randint(0, 256, (g, o, i), dtype=torch.uint8, device=DEVICE) & 0xBF
            scales = torch.randint(115, 121, (g, o // 32, i // 32), dtype=torch.uint8, device=DEVICE)
            x = torch.randn(rows, g, i, device=DEVICE).to(torch.bfloat16)
            x = x if name == "wo_a" else rounded_to_codes(x)
            want = None
            if not COMPILE:
                want = torch.stack([
                    torch.cat([x[:, k].double() @ fp8.dequantize_tiles(codes[k, a:a + 4096], scales[k, a // 32:(a + 4096) // 32]).double().T
                               for a in range(0, o, 4096)], 1) for k in range(g)], 1)
            num_bytes = codes.numel() * 1025 / 1024 + rows * 2 * g * (i + o)
            floor = max(num_bytes / 4.3e6, 2 * rows * codes.numel() / 790e6)
            done = []
            for label, call in variants(name, rows):
                number += 1
                if COMPILE and number % parts != index:
                    continue
                if not COMPILE and time.time() - BEGAN > LIMIT:
                    print("out of time", name, rows)
                    break
                try:
                    got = call(x, codes, scales)
                    if COMPILE:
                        torch.cuda.synchronize() if DEVICE == "cuda" else None
                        continue
                    poison = torch.full_like(got, float("nan"))
                    del got, poison
                    got = call(x, codes, scales)
                    again = call(x, codes, scales)
                    error = float((got.double() - want).norm() / want.norm())
                    if not error <= 3e-3 or not torch.equal(got, again):
                        print("WRONG", name, rows, label, error, torch.equal(got, again), flush=True)
                        continue
                    us = clock(lambda: call(x, codes, scales))[0]
                    done.append((us, label, error))
                except Exception as e:
                    print("FAIL", name, rows, label, repr(e)[:300], flush=True)
            if not done:
                continue
            done.sort(reverse=True)
            for us, label, _ in done:
                head = label.rsplit(" sh", 1)[0] + (" add" if label.endswith(" add") else "")
                totals.setdefault((rows, head), []).append(us)
            print(f"-- {name} rows {rows}, floor {floor:.1f}: " + "; ".join(f"{label} {us:.1f}" for us, label, _ in done))
            us, label, error = done[-1]
            old = next((d[0] for d in done if d[1] == "main"), float("nan"))
            print(f"   best {label}: {us:.1f} us, {floor / us:.2f} of the floor, error {error:.1e}; main {old:.1f}, {floor / old:.2f}", flush=True)
            if g == 1:
                whole = clock(lambda: old_main(main_kernel._rounded(x[:, 0]).unsqueeze(1), codes, scales))[0]
                alone = clock(lambda: main_kernel._rounded(x[:, 0]))[0]
                print(f"   main with its rounding {whole:.1f}, the rounding alone {alone:.1f}", flush=True)
            best_of[name, rows] = us, label, old, floor
    if COMPILE:
        return
    print("== if all bests were chosen (us, share of the floor; main)")
    for name in SHAPES:
        print(f"{name}: " + " | ".join(f"{r}: {best_of[name, r][0]:.1f} {best_of[name, r][3] / best_of[name, r][0]:.2f} ({best_of[name, r][2]:.1f}) {best_of[name, r][1]}"
                                       for r in (1, 2, 8, 16, 32, 64) if (name, r) in best_of))
    print("== one configuration for every shape: the sum")
    for rows in (1, 2, 8, 16, 32, 64):
        sums = sorted((sum(v), k[1]) for k, v in totals.items() if k[0] == rows and len(v) == len(SHAPES))
        print(f"rows {rows}: " + "; ".join(f"{label} {total:.1f}" for total, label in sums[:10]))
    describe()
    print(f"{time.time() - BEGAN:.0f} s")


main()
