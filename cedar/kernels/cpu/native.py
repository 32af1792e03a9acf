"""The compiled half of the CPU backend: builds `native.c` once, loads it, hands out its functions.

`make setup` runs `python -m cedar.kernels.cpu.native`, which compiles if there is a C compiler. Without the
library every op falls back to the torch reference, with the reason logged.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
BUILD = Path(__file__).with_name("_build")
# contraction to fused multiply-add is the only liberty: the order of every sum stays as written
FLAGS = ("-O3", "-march=native", "-std=gnu99", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp-simd")

# beyond these the torch reference, which uses all cores, is faster; deterministic mode's blocks lie below
MAX_ROWS = 64


def _library_path() -> Path:
    """One file per source, flags and processor, so that a copied or stale build is never loaded."""
    try:
        cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + cpu.encode()).hexdigest()[:16]
    return BUILD / f"native-{key}.so"


def compile_library() -> Path:
    """Compile `native.c` unless it is compiled already.

    Raises:
        RuntimeError: No C compiler, or it failed; the message holds what it said.
    """
    path = _library_path()
    if path.exists():
        return path
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler on the path: install gcc and run `make setup` again")
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        target = Path(scratch) / path.name
        command = [compiler, *FLAGS, "-shared", "-fPIC", "-fvisibility=hidden", "-o", str(target), str(SOURCE), "-lm"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr}")
        # two builds at once end with one whole file
        target.replace(path)
    return path


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    path = _library_path()
    return ctypes.CDLL(str(path)) if path.exists() else None


def build_id() -> str:
    """The library that is used, or nothing: another source, other flags and another processor give another."""
    path = _library_path()
    return path.stem if path.exists() else ""


def unavailable(device: str) -> str:
    """Why the compiled kernels cannot run on `device`, or an empty string."""
    if device != "cpu":
        return "compiled for the CPU"
    return "" if _library() is not None else "not compiled: run `make setup` on a machine with gcc"


@functools.lru_cache(maxsize=64)
def function(name: str, signature: str) -> Callable[..., int | None]:
    """The C function, with argument types by letter: p pointer, l int64, i int, f float."""
    library = _library()
    assert library is not None, "unavailable() said so"
    types = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
    found = getattr(library, name)
    found.argtypes = [types[letter] for letter in signature]
    found.restype = ctypes.c_int if name == "attention" else None
    return found


def fits(op: str, *tensors: Tensor) -> bool:
    """float32 rows, few of them."""
    first = tensors[0]
    return first.dtype is torch.float32 and first.shape[0] <= MAX_ROWS and tensors[-1].dtype is torch.float32


def rows(tensor: Tensor) -> Tensor:
    """`tensor` with its values side by side."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def main() -> int:
    """Compile for `make setup`; a machine without a compiler is fine, and is told what it misses."""
    try:
        print(f"compiled kernels: {compile_library().name}")
    except RuntimeError as error:
        print(f"compiled kernels: none, cedar runs on plain torch ({error})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
