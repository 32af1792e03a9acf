"""The one rule that picks a kernel, and the mode that makes rows independent of their neighbours.

`select(op, *tensors)`: a forced backend is used or raises `KernelUnavailable` with the reason. Otherwise the
device's list is walked and the first backend that can is taken: it imports, it has a backward if one is needed, the
sizes are within its stated limits. Each skip but that for size is logged once. The reference can always.

A Triton kernel that turns out not to build on this machine is left out from then on: the log names it and the reason
once, and the next backend runs.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from cedar.errors import KernelUnavailable, ShapeError

log = logging.getLogger(__name__)

# op -> the backends that implement it and the family file that holds it: cedar.kernels.<backend>.<family>
BACKENDS: dict[str, dict[str, str]] = {
    "attention": {"reference": "attention", "cpu": "attention"},
    "masked_attention": {"reference": "attention", "triton": "masked_attention"},
    "index_scores": {"reference": "indexer", "cpu": "indexer", "triton": "masked_indexer"},
    "gathered_index_scores": {"reference": "indexer", "cpu": "indexer"},
    "masked_index_scores": {"reference": "indexer", "triton": "masked_indexer"},
    "topk_mask": {"reference": "indexer", "triton": "masked_indexer"},
    "index_divergence": {"reference": "indexer", "triton": "masked_indexer"},
    "paged_attention": {"reference": "attention", "triton": "paged_attention"},
    "paged_index_scores": {"reference": "indexer", "triton": "paged_indexer"},
    "paged_pool_scores": {"reference": "indexer", "triton": "paged_indexer"},
    "top_entries": {"reference": "indexer", "cpu": "indexer", "triton": "topk"},
    "block_scores": {"reference": "indexer", "triton": "blocks"},
    "top_members": {"reference": "indexer", "triton": "topk"},
    "store_rows": {"reference": "pages", "triton": "pages"},
    "locate": {"reference": "pages", "triton": "locate"},
    "split_latent": {"reference": "pages", "triton": "pages"},
    "split_projected": {"reference": "pages", "triton": "pages"},
    "store_normed": {"reference": "pages", "triton": "pages"},
    "load_rows": {"reference": "pages"},
    "pool_groups": {"reference": "compress"},
    "pool_pairs": {"reference": "compress", "triton": "compress"},
    "route": {"reference": "experts", "cpu": "experts", "triton": "route"},
    "packed_experts": {"reference": "experts", "triton": "packed_experts"},
    "advance_routed": {"reference": "experts", "triton": "advance"},
    "advance_fed": {"reference": "experts", "triton": "advance"},
    "feed": {"reference": "experts", "triton": "feed"},
    "experts": {"reference": "experts", "cpu": "experts", "cuda": "experts"},
    "mix_coefficients": {"reference": "mhc", "cpu": "mhc", "triton": "mhc"},
    "collapse": {"reference": "mhc", "cpu": "mhc", "triton": "mhc"},
    "expand": {"reference": "mhc", "cpu": "mhc", "triton": "mhc"},
    "advance_projected": {"reference": "mhc", "triton": "advance"},
    "advance": {"reference": "mhc", "triton": "advance"},
    "draw_rows": {"reference": "sampling", "triton": "sampling"},
    "choose_rows": {"reference": "sampling"},
    "engram_rows": {"reference": "engram"},
    "engram_gate": {"reference": "engram", "triton": "engram"},
    "look_back": {"reference": "engram", "triton": "engram"},
    "engram_memory": {"reference": "engram", "triton": "engram"},
    "linear": {"reference": "dense", "cpu": "dense"},
    "linear_float32": {"reference": "dense", "cuda": "dense"},
    "norm_round": {"reference": "dense", "triton": "few_rows"},
    "packed_linear": {"reference": "dense", "triton": "packed_linear"},
    "packed_grouped_linear": {"reference": "dense", "triton": "packed_linear"},
    "grouped_linear": {"reference": "dense", "triton": "few_rows"},
    "rms_norm": {"reference": "dense", "cpu": "dense", "triton": "dense"},
    "rotate": {"reference": "dense", "cpu": "dense", "triton": "dense"},
    "swiglu": {"reference": "dense", "cpu": "dense", "triton": "dense"},
    "swiglu_round": {"reference": "dense", "triton": "gates"},
    "add_round": {"reference": "dense", "triton": "gates"},
    "round_rows": {"reference": "quantize", "cpu": "quantize", "triton": "quantize"},
}
# the order in which a device's backends are tried
ORDER: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("triton", "cuda", "reference")}

ENVIRONMENT_VARIABLE = "CEDAR_KERNELS"
# read once: select runs some hundred times a token
_FORCED_BY_ENVIRONMENT = os.environ.get(ENVIRONMENT_VARIABLE) or None
# rows per call in deterministic mode: f32 `linear` gives a row other bits below 16 rows (serving.md 2.7)
ROW_BLOCK = 16

_forced: ContextVar[str | None] = ContextVar("forced_backend", default=None)
_deterministic: ContextVar[bool] = ContextVar("deterministic", default=False)


@contextmanager
def use_kernels(backend: str) -> Iterator[None]:
    """Force one backend for every op that has it; an op that lacks it raises `KernelUnavailable`.

    `reference` exists for every op.
    """
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Make every row's bits independent of how many rows run beside it and where it stands among them.

    Each row-wise op runs in calls of exactly `ROW_BLOCK` rows, padded with zeros; beyond the CPU the references run.
    It costs speed.
    """
    token = _deterministic.set(enabled)
    try:
        yield
    finally:
        _deterministic.reset(token)


def is_deterministic() -> bool:
    return _deterministic.get()


def select(op: str, *tensors: Tensor) -> Callable[..., Any]:
    """The function that runs `op` on these tensors; the first one decides device and size.

    Raises:
        KernelUnavailable: The forced backend does not exist for this op, cannot run here, or states limits
            that these tensors pass.
    """
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    forced = _forced.get() or _FORCED_BY_ENVIRONMENT
    if forced is None and _deterministic.get() and tensors[0].device.type != "cpu":
        # a GPU kernel shares out its work by the number of rows and keys, and adds in another order then
        forced = "reference"
    for backend, function, fits in _choices(op, tensors[0].device.type, needs_grad, forced):
        if fits is None or fits(op, *tensors):
            if backend == "triton" and forced is None:
                return functools.partial(_or_without, op, function, tensors)
            return function
        if forced is not None:
            sizes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
            raise KernelUnavailable(f"backend {backend!r} runs {op} only within its limits, got {sizes}")
    raise KernelUnavailable(f"no backend can run {op} on {tensors[0].device}")


# what did not build, and why
_broken: dict[tuple[str, str], str] = {}


def _or_without(
    op: str, function: Callable[..., Any], tensors: tuple[Tensor, ...], *arguments: Any, **keywords: Any
) -> Any:
    """Run Triton's `op`; if it cannot be built here, leave it out for good and run the next backend's."""
    try:
        return function(*arguments, **keywords)
    except Exception as error:
        if not _is_of_the_build(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    _broken["triton", op] = reason
    _choices.cache_clear()
    log.warning("kernel %s: going on without triton's on %s, it does not build: %s", op, tensors[0].device.type, reason)
    return select(op, *tensors)(*arguments, **keywords)


def _is_of_the_build(error: Exception) -> bool:
    """Whether an error comes from compiling or launching, not from what the kernel was given or from the device."""
    if isinstance(error, (KernelUnavailable, subprocess.SubprocessError)):
        return True
    if isinstance(error, (torch.OutOfMemoryError, ShapeError)):
        return False
    # Triton's own errors, and what it raises when it misses a compiler or a driver
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return "triton" in (type(error).__module__.split(".")[0], where.split(".")[0])


@functools.lru_cache(maxsize=256)
def _choices(
    op: str, device: str, needs_grad: bool, forced: str | None
) -> tuple[tuple[str, Callable[..., Any], Callable[..., bool] | None], ...]:
    """The backends that can run `op` here, best first: (name, function, what sizes it takes or None for all)."""
    backends = BACKENDS[op]
    if forced is not None and forced not in backends:
        raise KernelUnavailable(
            f"backend {forced!r} has no {op}; there are {', '.join(backends)}. "
            f"Unset {ENVIRONMENT_VARIABLE} or leave use_kernels to let cedar choose"
        )
    choices = []
    for backend in (forced,) if forced is not None else ORDER.get(device, ("reference",)):
        if backend not in backends:
            continue
        module, reason = _load(op, backend, device, needs_grad)
        if module is not None:
            choices.append((backend, getattr(module, op), getattr(module, "fits", None)))
        elif forced is not None:
            raise KernelUnavailable(f"backend {backend!r} cannot run {op} on {device}: {reason}")
        else:
            log.info("kernel %s: skipping %s on %s: %s", op, backend, device, reason)
    return tuple(choices)


def _load(op: str, backend: str, device: str, needs_grad: bool) -> tuple[ModuleType | None, str]:
    """The backend's module, or None and the reason why it cannot run here."""
    if (backend, op) in _broken:
        return None, f"it did not build: {_broken[backend, op]}"
    try:
        module = importlib.import_module(f"cedar.kernels.{backend}.{BACKENDS[op][backend]}")
    except ImportError as error:
        return None, f"it does not import: {error}"
    reason = module.unavailable(device) if hasattr(module, "unavailable") else ""
    if reason:
        return None, reason
    if needs_grad and op in getattr(module, "FORWARD_ONLY", ()):
        return None, "it has no backward"
    return module, ""


def explain(device: str, *, needs_grad: bool = False) -> list[tuple[str, str, str]]:
    """For each op: (op, backend tried first on `device`, why the ones before it cannot)."""
    rows = []
    for op, backends in BACKENDS.items():
        skipped: list[str] = []
        for backend in ORDER.get(device, ("reference",)):
            if backend not in backends:
                continue
            module, reason = _load(op, backend, device, needs_grad)
            if module is not None:
                rows.append((op, backend, "; ".join(skipped)))
                break
            skipped.append(f"{backend}: {reason}")
    return rows


Function = TypeVar("Function", bound=Callable[..., Any])


def row_op(num_row_arguments: int) -> Callable[[Function], Function]:
    """Mark an op whose first `num_row_arguments` arguments (tensors or None) have one leading row axis.

    Outside deterministic mode this does nothing. Inside, the op runs in blocks of `ROW_BLOCK` rows, so
    that it always sees the same shapes.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            if not _deterministic.get():
                return function(*arguments, **keywords)
            rows, rest = arguments[:num_row_arguments], arguments[num_row_arguments:]
            count = next(row.shape[0] for row in rows if row is not None)
            if count == 0:
                return function(*arguments, **keywords)
            blocks = [None if row is None else _padded(row).split(ROW_BLOCK) for row in rows]
            outputs = [
                function(*(None if block is None else block[i] for block in blocks), *rest, **keywords)
                for i in range(-(-count // ROW_BLOCK))
            ]
            if isinstance(outputs[0], tuple):
                return tuple(_joined([output[i] for output in outputs], count) for i in range(len(outputs[0])))
            return _joined(outputs, count)

        return run  # type: ignore[return-value]

    return decorate


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % ROW_BLOCK
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _joined(outputs: list[Tensor | None], count: int) -> Tensor | None:
    if outputs[0] is None:
        return None
    return torch.cat(outputs)[:count]  # type: ignore[arg-type]
