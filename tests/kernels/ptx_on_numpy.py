"""One warp's straight-line PTX on numpy: what a kernel's inline assembly computes, on a machine without a GPU.

A register is 32 words, one a lane. Only the instructions that the kernels' assembly has.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

Register = NDArray[np.uint32]
_LANES = 32


def run_warp(assembly: str, registers: dict[str, Register]) -> dict[str, Register]:
    """The registers after the assembly; operands are those of the caller's, by name (`$16`)."""
    held = dict(registers)
    for line in assembly.split(";"):
        instruction = line.strip().removeprefix("{").strip()
        if instruction and not instruction.startswith((".reg", "}")):
            _step(held, instruction)
    return held


def _step(held: dict[str, Register], instruction: str) -> None:
    name, operands = instruction.split(None, 1)
    if name.startswith("mma.sync.aligned.m16n8k16"):
        _multiply(held, *([part.strip() for part in group.split(",")] for group in re.findall(r"{(.*?)}", operands)))
        return
    if name == "mov.b32":
        halves, source = re.fullmatch(r"{(.*)}, (.*)", operands).groups()  # type: ignore[union-attr]
        low, high = halves.split(", ")
        held[low], held[high] = held[source] & 0xFFFF, held[source] >> 16
        return
    target, *sources = operands.split(", ")
    a, b, c = ([_value(held, source) for source in sources] + [np.zeros(_LANES, np.uint32)] * 3)[:3]
    match name:
        case "and.b32":
            y = a & b
        case "xor.b32":
            y = a ^ b
        case "shl.b32":
            y = a << b
        case "prmt.b32":
            byte = np.concatenate([a.view(np.uint8).reshape(_LANES, 4), b.view(np.uint8).reshape(_LANES, 4)], axis=1)
            y = byte[:, [int(c[0]) >> 4 * place & 7 for place in range(4)]].copy().view(np.uint32)[:, 0]
        case "cvt.f32.f16":
            y = a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        case "cvt.rn.f16x2.f32":
            high, low = (x.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for x in (a, b))
            y = high << 16 | low
        case "mov.f32":
            y = a
        case "mul.f32":
            y = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
        case "fma.rn.f32":
            y = (a.view(np.float32) * b.view(np.float32) + c.view(np.float32)).view(np.uint32)
        case _:
            raise ValueError(f"{instruction}: {name} is not among the instructions that run here")
    held[target] = y


def _value(held: dict[str, Register], name: str) -> Register:
    if name in held:
        return held[name]
    return np.full(_LANES, int(name.removeprefix("0f"), 16 if name.startswith("0f") else 0), np.uint32)


def _multiply(held: dict[str, Register], d: list[str], a: list[str], b: list[str], c: list[str]) -> None:
    """m16n8k16: a lane is (row or column `g` of eight, pair `q` of four)."""
    left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)

    def halves(name: str, lane: int) -> NDArray[np.float16]:
        return held[name][lane : lane + 1].view(np.float16)

    for lane in range(_LANES):
        g, q = divmod(lane, 4)
        for place, name in enumerate(a):
            left[g + place % 2 * 8, q * 2 + place // 2 * 8 :][:2] = halves(name, lane)
        for place, name in enumerate(b):
            right[q * 2 + place * 8 :, g][:2] = halves(name, lane)
    product = left @ right
    lane = np.arange(_LANES)
    for place, (target, source) in enumerate(zip(d, c, strict=True)):
        part = product[lane // 4 + place // 2 * 8, lane % 4 * 2 + place % 2]
        held[target] = (held[source].view(np.float32) + part).view(np.uint32)
