"""Shape and dtype checks, called once in each public op; the backends below it trust them."""

from __future__ import annotations

from torch import Tensor

from cedar.errors import ShapeError


def shape(op: str, name: str, tensor: Tensor, *expected: int | None) -> None:
    """Raise `ShapeError` unless `tensor` has the expected sizes; None accepts any size.

    >>> import torch
    >>> shape("linear", "x", torch.zeros(2, 3), None, 4)
    Traceback (most recent call last):
    cedar.errors.ShapeError: linear: x has shape (2, 3), expected (any, 4)
    """
    actual = tensor.shape
    if len(actual) == len(expected):
        for have, want in zip(actual, expected, strict=True):
            if want is not None and have != want:
                break
        else:
            return
    wanted = ", ".join("any" if size is None else str(size) for size in expected)
    raise ShapeError(f"{op}: {name} has shape {tuple(actual)}, expected ({wanted})")
