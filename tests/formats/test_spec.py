"""Bytes per stored vector."""

import subprocess
import sys

import pytest

from cedar.errors import ShapeError
from cedar.formats.spec import FP4_INDEX, FP4_MAIN, FP8, FormatSpec


@pytest.mark.parametrize(
    ("spec", "channels", "elements", "total"),
    [(FP8, 512, 512, 528), (FP4_MAIN, 512, 256, 288), (FP4_INDEX, 128, 64, 68)],
    ids=["window", "main", "index"],
)
def test_vectors_of_the_release_take_528_288_and_68_bytes(
    spec: FormatSpec, channels: int, elements: int, total: int
) -> None:
    assert spec.element_bytes(channels) == elements
    assert spec.vector_bytes(channels) == total


@pytest.mark.parametrize("channels", [0, -32, 31, 48])
def test_channels_that_do_not_fill_groups_are_refused(channels: int) -> None:
    with pytest.raises(ShapeError, match=f"{channels} channels .* groups of 32"):
        FP8.vector_bytes(channels)


def test_spec_imports_no_torch() -> None:
    code = "import sys, cedar.formats.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
