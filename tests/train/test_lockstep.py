"""Sequences side by side are what each would be alone."""

from __future__ import annotations

import pytest
import torch

from cedar.chat.tokenizer import Tokenizer
from cedar.config.rounding import Rounding
from cedar.model.transformer import Transformer
from cedar.train.lockstep import Lockstep, sample
from cedar.train.run import new_model
from tests.train.conftest import tiny_recipe

LENGTH = 44


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    model = new_model(tiny_recipe(), tokenizer, torch.device("cpu"))
    # a random model's roundings turn the last bit of a sum into a step of a format
    model.rounding = Rounding.none()
    return model


def test_lockstep_is_prefill_and_decode(model: Transformer) -> None:
    """Prompts of 5, 17 and 30 tokens, around and beyond the window of 16, with bounded replay."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (count,), generator=generator).tolist() for count in (5, 17, 30)]
    window = model.config.attention.sliding_window
    state = Lockstep(model, len(prompts), LENGTH)
    state.floor_B.copy_(torch.tensor([max(0, len(prompt) - window) for prompt in prompts]))
    rows = [list(prompt) for prompt in prompts]
    logits = []
    for at in range(LENGTH):
        logits.append(state.step(torch.tensor([row[at] for row in rows])))
        for row, token in zip(rows, logits[-1].argmax(-1).tolist(), strict=True):
            if len(row) == at + 1:
                row.append(token)
    for number, prompt in enumerate(prompts):
        alone = model.new_state()
        got = [model.prefill(alone, torch.tensor(prompt), last_only=True)[-1]]
        for token in rows[number][len(prompt) : LENGTH]:
            got.append(model.decode(alone, torch.tensor([token]))[-1])
        want = torch.stack([step[number] for step in logits[len(prompt) - 1 :]])
        assert (torch.stack(got) - want).abs().max() < 1e-4


def test_samples_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(5)
    drawn = sample(logits.expand(40000, 4), torch.full((40000,), 0.7), generator)
    want = torch.softmax(logits / 0.7, -1)
    assert (torch.bincount(drawn, minlength=4) / 40000 - want).abs().max() < 0.01
    assert sample(logits.expand(50, 4), torch.zeros(50), generator).eq(0).all()
