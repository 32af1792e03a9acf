"""What is approximate, by the names of serving.md 2.7: A1 to A3 on trained weights, gated (about 10 s).

`python -m benchmarks.approximate` prints the whole report.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.approximate import FOLLOWING, Distance, bounded_decoder, bounded_replays, close_snapshot, text_ids
from cedar.engine.load import load_model, open_model
from cedar.model.transformer import Transformer
from tests.device import DEVICE

pytestmark = pytest.mark.device

PROMPT = 500


@pytest.fixture(scope="module")
def trained() -> Transformer:
    return load_model(open_model(), device=str(DEVICE), dtype=torch.float32)


def assert_near(distance: Distance) -> None:
    """Gates some times above what the bundled model shows: a broken way is far beyond them."""
    assert distance.divergence < 0.05, distance
    assert distance.agreement > 0.85, distance


def test_a1_the_decoder_on_the_last_window(trained: Transformer) -> None:
    assert_near(bounded_decoder(trained, text_ids(PROMPT + FOLLOWING).to(DEVICE), PROMPT))


@pytest.mark.parametrize(
    ("prompt", "counts"), [(PROMPT, [1, 4]), pytest.param(3000, list(range(1, 51)), marks=pytest.mark.slow)]
)
def test_a2_bounded_replays_do_not_drift(trained: Transformer, prompt: int, counts: list[int]) -> None:
    for distance in bounded_replays(trained, text_ids(prompt + FOLLOWING).to(DEVICE), prompt, counts).values():
        assert_near(distance)


def test_a3_a_snapshot_and_less_than_a_window(trained: Transformer) -> None:
    window = trained.config.attention.sliding_window
    for added in (1, window - 1):
        assert_near(close_snapshot(trained, text_ids(PROMPT + FOLLOWING).to(DEVICE), PROMPT, added))


def test_a_distance_of_nothing_is_none() -> None:
    logits = torch.randn(5, 9)
    assert Distance.of(logits, logits) == Distance(0.0, 0.0, 1.0)
