"""A CUDA device that is none: tensors say they lie on `cuda:0` and live in host memory (CEDAR_TEST_DEVICE=pretend).

An op whose tensors lie on two devices fails here as it would on a GPU, so a machine without one can tell whether cedar
keeps its tensors apart. Kernels are the references, graphs run their calls one by one.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_CUDA = torch.device("cuda", 0)
# whether this thread captures a graph
_capture = threading.local()
# ops that may take an index on the host beside a tensor on the device, or copy between the two
_MIXED = ("copy_", "_to_copy", "index", "_index_put_impl_", "index_put_", "index_put", "_unsafe_index")


class OnDevice(Tensor):
    """A tensor of the pretended device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            device=_CUDA,
        )  # fmt: skip
        made.held = real
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnDevice({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given, spec = tree_flatten((args, kwargs))
    on_device = [one for one in given if isinstance(one, OnDevice)]
    name = func.overloadpacket.__name__
    if getattr(_capture, "runs", False):
        _refuse_to_wait(name, given, on_device, kwargs)
    for one in given:
        if not isinstance(one, Tensor) or isinstance(one, OnDevice) or not on_device or one.dim() == 0:
            continue
        # an index on the host may point into the device, not the other way round
        if name not in _MIXED or ("index" in name and one is given[0]):
            raise RuntimeError(f"{name}: tensors on cuda:0 and on {one.device}, {tuple(one.shape)} {one.dtype}")
    device = kwargs.get("device")
    if device is None:
        target = bool(on_device)
        if name in ("copy_", "index_put_", "_index_put_impl_"):
            target = isinstance(given[0], OnDevice)
    else:
        target = torch.device(device).type == "cuda"
    wrappers = {id(one.held): one for one in on_device}

    def unwrap(one: Any) -> Any:
        if isinstance(one, OnDevice):
            return one.held
        return torch.device("cpu") if isinstance(one, torch.device) and one.type == "cuda" else one

    args, kwargs = tree_unflatten([unwrap(one) for one in given], spec)
    kwargs.pop("pin_memory", None)
    kwargs.pop("non_blocking", None) if name == "_to_copy" else None
    result = func(*args, **kwargs)

    def wrap(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) in wrappers:
            return wrappers[id(one)]
        return OnDevice(one) if target else one

    return tree_map(wrap, result)


def _refuse_to_wait(name: str, given: list[Any], on_device: list[OnDevice], kwargs: dict[str, Any]) -> None:
    """What a graph cannot hold: a look at a value, a copy that the host waits for.

    Shapes out of data pass: the reference of the experts has them, which no GPU captures.
    """
    across = any(isinstance(one, Tensor) and not isinstance(one, OnDevice) for one in given) and bool(on_device)
    if name == "_to_copy":
        target = kwargs.get("device")
        across = target is not None and (torch.device(target).type == "cuda") != bool(on_device)
    waits = name in ("copy_", "_to_copy") and across and not (kwargs.get("non_blocking") or True in given[2:])
    if waits or (on_device and name in ("_local_scalar_dense", "equal")):
        raise RuntimeError(f"{name} while a graph is captured")


class _Mode(TorchDispatchMode):
    # torch makes no real CUDA context under a mode of this kind
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __enter__(self) -> _Mode:
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


def _name_the_device() -> None:
    """A build of torch without CUDA knows no such device until somebody registers one."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "device.cpp", Path(directory) / "device.so"
        source.write_text(
            "#include <c10/core/impl/DeviceGuardImplInterface.h>\n"
            "namespace { struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {}; }\n"
            "C10_REGISTER_GUARD_IMPL(CUDA, Guard)\n"
        )
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        subprocess.run(["g++", str(source), "-o", str(library), *flags], check=True)
        ctypes.CDLL(str(library))


def install() -> None:
    """From here on this process has a GPU, in every thread that starts."""
    # it looks at torch's functions when it is imported, which a mode does sooner or later
    importlib.import_module("torch._dynamo")
    _name_the_device()
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None
    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda _: None, wait_event=lambda _: None)
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda _: None)
    torch.cuda.current_stream = torch.cuda.Stream = lambda *_: stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.cuda.graph_pool_handle = lambda: None
    Tensor.pin_memory = lambda self: self
    # a parameter that keeps its place keeps its class, and so would be none of these
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # tensors made of another tensor's parts cannot be views in that mode
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else nullcontext()
    run = threading.Thread.run

    def run_on_device(self: threading.Thread) -> None:
        with _Mode():
            run(self)

    threading.Thread.run = run_on_device  # type: ignore[method-assign]
    _Mode().__enter__()

    from cedar.engine.runner import DecodeRunner

    def captured(self: DecodeRunner, calls: Callable[[], None]) -> Callable[[], None]:
        calls()
        _capture.runs = True
        try:
            calls()
        finally:
            _capture.runs = False
        return calls

    DecodeRunner._captured = captured  # type: ignore[method-assign]
