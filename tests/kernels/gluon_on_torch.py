"""A Gluon kernel run on torch tensors: what it computes, not where its values lie. Triton interprets no Gluon.

`interpreted` gives the module's kernel a language whose tensors are torch's; layouts are ignored, barriers and waits
do nothing, shared memory begins as NaN, and the module's inline assembly is replaced by what its docstring says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.language import constexpr
from triton.runtime.jit import JITFunction

# integers are held as int64, whatever their width
_TYPES = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "uint8": torch.uint8,
    "int16": torch.int16, "uint16": torch.uint16, "int32": torch.int32, "uint32": torch.int32, "int64": torch.int64,
}  # fmt: skip


def _plain(value: Any) -> Any:
    return value.data if isinstance(value, Value) else value


class Value:
    """A tensor of the kernel."""

    def __init__(self, data: Any) -> None:
        data = torch.as_tensor(data)
        self.data = data if data.is_floating_point() or data.dtype == torch.bool else data.long()
        self.type = SimpleNamespace(layout=None)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        if not bitcast:
            unsigned = {torch.uint8: 0xFF, torch.uint16: 0xFFFF}.get(dtype)
            return Value(self.data.long() & unsigned if unsigned else self.data.to(dtype))
        if dtype == torch.float16:
            return Value(self.data.to(torch.int16).view(torch.float16))
        if dtype == torch.float32:
            return Value(self.data.to(torch.int32).view(torch.float32))
        if dtype == torch.int32:
            return Value(self.data.view(torch.int32))
        return Value(self.data.view(torch.int16).long() & 0xFFFF)


def _operator(of_two: Callable[[Any, Any], Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(of_two(self.data, _plain(other)))

    def backward(self: Value, other: Any) -> Value:
        return Value(of_two(torch.as_tensor(other), self.data))

    return forward, backward


for _name, _of_two in {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "ne": lambda a, b: a != b,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "mod": torch.fmod,
}.items():  # fmt: skip
    _forward, _backward = _operator(_of_two)
    setattr(Value, f"__{_name}__", _forward)
    setattr(Value, f"__r{_name}__", _backward)


class Pointer:
    """Elements of a storage, by offset."""

    def __init__(self, storage: Tensor, offset: Any, dtype: torch.dtype) -> None:
        self.storage, self.offset, self.dtype = storage, offset, dtype

    @staticmethod
    def of(tensor: Tensor) -> Pointer:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return Pointer(storage, torch.tensor(tensor.storage_offset()), tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.storage, self.offset + _plain(offset), self.dtype)

    def to(self, dtype: torch.dtype) -> Pointer:
        size = dtype.itemsize // self.dtype.itemsize
        assert bool((self.offset % size == 0).all()), "a pointer that is not aligned"
        return Pointer(self.storage, self.offset // size, dtype)

    def elements(self) -> Tensor:
        return self.storage.view(self.dtype)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, place: Any) -> Shared:
        return Shared(self.data[int(place)])

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: None) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert value.data.shape == self.data.shape
        self.data.copy_(value.data)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
        return Shared(self.data.view(dtype).view(shape))


class Language:
    """`triton.experimental.gluon.language`, as far as needed."""

    constexpr = object

    def __init__(self) -> None:
        self.place: tuple[int, ...] = (0, 0)
        self.grid: tuple[int, ...] = (0, 0)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_, **__: None
        if name in _TYPES:
            return _TYPES[name]
        raise AttributeError(name)

    def pointer_type(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def program_id(self, axis: int) -> Value:
        return Value(self.place[axis])

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
        return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else -2, dtype=dtype))

    def load(self, pointer: Pointer, mask: Value | None = None, other: Any = 0, cache_modifier: str = "") -> Value:
        offset, there = torch.broadcast_tensors(pointer.offset, torch.tensor(True) if mask is None else mask.data)
        # what is masked is not touched
        found = pointer.elements()[offset.where(there, 0)]
        return Value(found.where(there, torch.as_tensor(other, dtype=found.dtype)))

    def store(self, pointer: Pointer, value: Value, mask: Value) -> None:
        assert value.data.is_floating_point() == pointer.dtype.is_floating_point
        offset, data, there = torch.broadcast_tensors(pointer.offset, value.data.to(pointer.dtype), mask.data)
        pointer.elements()[offset[there]] = data[there]

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> int:
        found = int(pointer.elements()[pointer.offset])
        pointer.elements()[pointer.offset] = found + value
        return found

    def atomic_xchg(self, pointer: Pointer, value: int, sem: str) -> None:
        pointer.elements()[pointer.offset] = value

    def arange(self, start: int, stop: int, layout: None) -> Value:
        return Value(torch.arange(start, stop))

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: None) -> Value:
        return Value(torch.zeros(shape, dtype=dtype))

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: None) -> Value:
        return Value(torch.full(shape, value, dtype=dtype))

    def expand_dims(self, x: Any, axis: int) -> Any:
        if isinstance(x, Pointer):
            return Pointer(x.storage, x.offset.unsqueeze(axis), x.dtype)
        return Value(x.data.unsqueeze(axis))

    def where(self, condition: Any, x: Any, y: Any) -> Value:
        return Value(torch.where(torch.as_tensor(_plain(condition)), _plain(x), _plain(y)))

    def maximum(self, x: Any, y: Any) -> Value:
        return Value(torch.maximum(torch.as_tensor(_plain(x)), torch.as_tensor(_plain(y))))

    def minimum(self, x: Any, y: Any) -> Value:
        return Value(torch.minimum(torch.as_tensor(_plain(x)), torch.as_tensor(_plain(y))))

    def max(self, x: Value, axis: int) -> Value:
        return Value(x.data.amax(axis))

    def sum(self, x: Value, axis: int) -> Value:
        return Value(x.data.sum(axis))

    def abs(self, x: Value) -> Value:
        return Value(x.data.abs())

    def exp(self, x: Value) -> Value:
        return Value(torch.exp(x.data))

    def exp2(self, x: Any) -> Value:
        return Value(torch.exp2(torch.as_tensor(_plain(x))))

    def cdiv(self, x: Any, y: int) -> Any:
        return (x + y - 1) // y

    def reshape(self, x: Value, shape: list[int]) -> Value:
        return Value(x.data.reshape(shape))

    def permute(self, x: Value, order: list[int]) -> Value:
        return Value(x.data.permute(order))

    def join(self, x: Value, y: Value) -> Value:
        return Value(torch.stack([x.data, y.data], dim=-1))

    def split(self, x: Value) -> tuple[Value, Value]:
        return Value(x.data[..., 0]), Value(x.data[..., 1])

    def convert_layout(self, x: Value, layout: None, assert_trivial: bool = False) -> Value:
        return x

    def thread_barrier(self) -> None:
        pass

    def static_range(self, stop: int) -> range:
        return range(stop)

    def warp_specialize(self, parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        with ThreadPoolExecutor(len(parts)) as pool:
            running = [pool.submit(part, *arguments) for part, arguments in parts]
            errors = [error for part in running if (error := part.exception())]
            # an assertion is that of one who waited in vain for another
            for error in sorted(errors, key=lambda error: isinstance(error, AssertionError)):
                raise error


class Barriers:
    """`mbarrier`: a word of shared memory counts the phases that are over; also how `async_copy` arrives."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self) -> None:
        self._changed = Condition()
        self._missing: dict[int, tuple[int, int]] = {}

    def init(self, barrier: Shared, count: int) -> None:
        barrier.data.zero_()
        self._missing[barrier.data.data_ptr()] = count, count

    def wait(self, barrier: Shared, phase: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: int(barrier.data) & 1 != int(phase), timeout=10)

    def arrive(self, barrier: Shared, count: int) -> None:
        with self._changed:
            every, missing = self._missing[barrier.data.data_ptr()]
            assert count <= missing
            barrier.data.add_(int(missing == count))
            self._missing[barrier.data.data_ptr()] = every, missing - count or every
            self._changed.notify_all()

    def async_copy_global_to_shared(self, shared: Shared, pointer: Pointer, mask: Value) -> None:
        offset, there = torch.broadcast_tensors(pointer.offset, mask.data)
        shared.data[there] = pointer.elements()[offset[there]]

    def mbarrier_arrive(self, barrier: Shared, increment_count: bool) -> None:
        """Each of the threads that copied."""
        assert not increment_count
        self.arrive(barrier, self._missing[barrier.data.data_ptr()][0])


def _product(a: Any, b: Shared, sums: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    product = a.data.float() @ b.data.float()
    return Value(product + sums.data if use_acc else product)


def _wait(outstanding: int, deps: list[Value]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _halves(
    word: Tensor, scale: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> Value:
    """Two float16 times their scale, as one word."""
    factor = (scale & 0xFFFF).to(torch.int16).view(torch.float16)
    low, high = ((decode(word).half() * factor).view(torch.int16).long() for decode in (first, second))
    return Value((low & 0xFFFF) | (high << 16))


def _widen_nibbles(word: Value, scale: Value) -> tuple[Value, ...]:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values]) * 2.0**-6

    def nibble(place: int) -> Callable[[Tensor], Tensor]:
        return lambda words: values[(words >> 4 * place) & 15]

    return tuple(
        _halves(word.data, scale.data, nibble(a), nibble(b)) for a, b in ((0, 2), (4, 6), (1, 3), (5, 7))
    )  # fmt: skip


def _widen_bytes(word: Value, scale: Value) -> tuple[Value, ...]:
    def byte(place: int) -> Callable[[Tensor], Tensor]:
        return lambda words: ((words >> 8 * place) & 255).to(torch.uint8).view(torch.float8_e4m3fn).float()

    return tuple(_halves(word.data, scale.data, byte(a), byte(b)) for a, b in ((0, 2), (1, 3)))


def _widen(word: Value, scale: Value) -> tuple[Value, ...]:
    bits = word.data & 0xFFFFFFFF
    pairs = bits, bits << 3, (bits << 6) ^ (bits << 1), (bits << 9) ^ (bits << 2)

    def half(shift: int) -> Callable[[Tensor], Tensor]:
        return lambda pair: ((pair & 0x8E008E00) >> shift & 0xFFFF).to(torch.int16).view(torch.float16)

    return tuple(_halves(pair, scale.data, half(0), half(16)) for pair in pairs)


def _pack(even: Value, odd: Value) -> Value:
    low, high = (x.data.bfloat16().view(torch.int16).long() for x in (even, odd))
    return Value((low & 0xFFFF) | (high << 16))


def _nothing(*_: Any) -> None:
    pass


@contextmanager
def interpreted(module: ModuleType, kernel: str) -> Iterator[Any]:
    """The module's kernel, to be launched as one: `kernel[grid](...)`."""
    language = Language()
    replaced: dict[str, Any] = {name: f.fn for name, f in vars(module).items() if isinstance(f, JITFunction)}
    replaced |= {name: value.value for name, value in vars(module).items() if isinstance(value, constexpr)}
    replaced |= {"gl": language, "warpgroup_mma": _product, "warpgroup_mma_wait": _wait, "_groups": _nothing}
    replaced |= dict.fromkeys(("fence_async_shared", "gdc_wait", "gdc_launch_dependents"), _nothing)
    replaced |= {"_widen_nibbles": _widen_nibbles, "_widen_bytes": _widen_bytes, "_pack": _pack}
    replaced |= {"_ask": _nothing, "_widen": _widen, "mbarrier": (barriers := Barriers()), "async_copy": barriers}
    replaced = {name: value for name, value in replaced.items() if hasattr(module, name)}

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
                pointers = [Pointer.of(a) if isinstance(a, Tensor) else a for a in arguments]
                language.grid = grid
                for language.place in itertools.product(*map(range, grid)):
                    replaced[kernel](*pointers, **constants)

            return launch

    with mock.patch.multiple(module, **replaced):
        yield Launcher()
