"""The golden rounding cases, and the devices they run on."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

VECTORS = Path(__file__).parent.parent / "vectors" / "quant.safetensors"


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    return load_file(VECTORS)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
