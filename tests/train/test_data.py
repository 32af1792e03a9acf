"""Packed batches: pure in (seed, step), samples that know nothing of each other, replay's floors."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from cedar.chat.tokenizer import BOS, PAD, Tokenizer
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError
from cedar.train.data import Batch, Batches, _repeated, _replayed, stream
from cedar.train.run import new_model
from cedar.train.sample import Sample
from tests.train.conftest import tiny_recipe

MIXED = {"mixture": {"copy": 0.3, "pairs": 0.3, "restate": 0.2, "lookup": 0.2}, "lengths": [32, 64, 128]}


def make(tokenizer: Tokenizer, **changes: object) -> Batches:
    stage = MIXED | changes.pop("stage", {})  # type: ignore[operator]
    config = tiny_recipe(row_tokens=128, rows=4, stage=stage, **changes)
    return Batches(config, tokenizer, {}, window=16)


def same(one: Batch, other: Batch) -> bool:
    pairs = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(Batch))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_a_batch_depends_on_seed_and_step_alone(tokenizer: Tokenizer) -> None:
    one, other = make(tokenizer), make(tokenizer)
    other.batch(3, 0)
    assert same(one.batch(7, 0), other.batch(7, 0))
    assert not same(one.batch(7, 0), one.batch(8, 0))
    assert not same(one.batch(7, 0), make(tokenizer, seed=4).batch(7, 0))


def test_workers_give_the_same_batches_in_order(tokenizer: Tokenizer) -> None:
    batches = make(tokenizer)
    keys = [(step, 0) for step in range(6)]
    alone = list(stream(batches, iter(keys), workers=0, pin=False))
    helped = list(stream(batches, iter(keys), workers=2, pin=False))
    assert [batch.step for batch in helped] == list(range(6))
    assert all(same(one, other) for one, other in zip(alone, helped, strict=True))


def test_samples_start_at_even_rows_and_targets_stay_inside(tokenizer: Tokenizer) -> None:
    batches = make(tokenizer)
    for step in range(20):
        batch = batches.batch(step, 0)
        start, ids, number = batch.segment_start_BS, batch.ids_BS, batch.sample_BS
        assert not (start % 2).any()
        row = torch.arange(128)
        assert (start <= row).all()
        first = start == row
        real = number >= 0
        assert (ids[first & real] == tokenizer.special[BOS]).all()
        assert (ids[~real] == tokenizer.special[PAD]).all()
        assert int(number.max()) == batch.num_samples - 1
        learnt = batch.targets_BS >= 0
        assert learnt.any(1).all()
        # a target is the next token of the same sample
        following = torch.roll(ids, -1, 1)
        assert (batch.targets_BS[learnt] == following[learnt]).all()
        assert (number[learnt] == torch.roll(number, -1, 1)[learnt]).all()
        assert real.float().mean() > 0.8


def test_shares_of_a_mixture_are_by_tokens(tokenizer: Tokenizer) -> None:
    batches = make(tokenizer, stage={"mixture": {"copy": 0.75, "pairs": 0.25}})
    counted = {"copy": 0, "pairs": 0}
    for name in counted:
        maker = batches.tasks.maker(name)

        def count(rng: np.random.Generator, length: int, name: str = name, maker: object = maker) -> Sample:
            sample = maker(rng, length)  # type: ignore[operator]
            counted[name] += len(sample.ids)
            return sample  # type: ignore[no-any-return]

        batches.tasks._makers[name] = count
    for step in range(60):
        batches.batch(step, 0)
    assert abs(counted["copy"] / sum(counted.values()) - 0.75) < 0.06


def test_dense_share(tokenizer: Tokenizer) -> None:
    batches = make(tokenizer, stage={"dense_share": 0.25})
    share = sum(batches.batch(step, 0).dense for step in range(200)) / 200
    assert 0.15 < share < 0.35


def test_unknown_source_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="'storys', which is neither a task nor a corpus"):
        make(tokenizer, stage={"mixture": {"storys": 1.0}})


# the eight resets of training.md 6, trap 10, seen from outside
def test_other_samples_of_a_pack_change_nothing(tokenizer: Tokenizer) -> None:
    batches = make(tokenizer, stage={"lengths": [32, 64]})
    model = new_model(batches.config, tokenizer, torch.device("cpu"))
    batch = batches.batch(1, 0)
    samples = [torch.nonzero(batch.sample_BS == number) for number in range(batch.num_samples)]
    pieces = [batch.ids_BS[rows[:, 0], rows[:, 1]].long() for rows in samples if 20 <= len(rows)][:3]
    assert len(pieces) == 3

    def logits(order: list[int]) -> dict[int, torch.Tensor]:
        ids, start, at = [], [], 0
        where = {}
        for index in order:
            piece = pieces[index]
            piece = torch.cat([piece, piece.new_full((len(piece) % 2,), tokenizer.special[PAD])])
            where[index] = (at, at + len(pieces[index]))
            ids.append(piece)
            start.append(torch.full_like(piece, at))
            at += len(piece)
        output = model(
            torch.cat(ids).unsqueeze(0),
            segment_start_BS=torch.cat(start).unsqueeze(0),
            rounding=Rounding.none(),
        )
        return {index: output.logits_BSV[0, a:b] for index, (a, b) in where.items()}

    with torch.no_grad():
        together, turned, alone = logits([0, 1, 2]), logits([2, 0, 1]), logits([1])
    for index in range(3):
        assert torch.allclose(together[index], turned[index], atol=1e-4)
    assert torch.allclose(together[1], alone[1], atol=1e-4)


def test_replay_of_a_chat_by_hand() -> None:
    ids, learn = np.zeros(60, np.uint16), np.ones(60, np.bool_)
    sample = Sample(ids, learn, ((30, 34), (50, 54)))
    floor, learnt = _replayed(np.random.default_rng(0), sample, 16)
    # before the first replay nothing is cut off, from 14 on the first prompt's floor holds, from 34 the second's:
    # its last window would begin at 34, where the first answer ends
    assert floor.tolist() == [0] * 14 + [14] * 20 + [34] * 26
    # a second turn shorter than the window restarts nothing, as `SequenceState.begin_prompt` has it
    short, _ = _replayed(np.random.default_rng(0), Sample(ids, learn, ((30, 34), (49, 54))), 16)
    assert short.tolist() == [0] * 14 + [14] * 46
    # row 29 predicts token 30
    assert np.flatnonzero(learnt).tolist() == [29, 30, 31, 32, 49, 50, 51, 52]


def test_replay_of_plain_text_learns_only_what_is_decoded() -> None:
    sample = Sample(np.zeros(64, np.uint16), np.ones(64, np.bool_))
    for seed in range(50):
        floor, learnt = _replayed(np.random.default_rng(seed), sample, 16)
        first = int(np.flatnonzero(learnt)[0])
        assert learnt[first:-1].all()
        assert not learnt[-1]
        start = max(0, first + 1 - 16)
        assert (floor[start:] == start).all()
        assert not floor[:start].any()


def test_replay_reaches_the_batch_with_row_numbers(tokenizer: Tokenizer) -> None:
    batches = make(tokenizer, stage={"replay_share": 1.0})
    batch = batches.batch(0, 0)
    assert (batch.window_floor_BS >= batch.segment_start_BS).all()
    assert (batch.window_floor_BS <= torch.arange(128)).all()
    assert (batch.window_floor_BS > batch.segment_start_BS).any()
    without = replace(batches.config.stages[0], replay_share=0.0)
    batches.config = replace(batches.config, stages=(without,))
    assert int((batches.batch(0, 0).targets_BS >= 0).sum()) > int((batch.targets_BS >= 0).sum())


def test_encoder_replay_repeats_a_window_that_teaches_nothing(tokenizer: Tokenizer) -> None:
    batches = make(tokenizer, stage={"encoder_replay_share": 1.0, "replay_share": 0.5, "lengths": [128]})
    window = batches.window
    found = 0
    for step in range(8):
        batch = batches.batch(step, 0)
        for row in range(batch.ids_BS.shape[0]):
            for number in batch.sample_BS[row].unique().tolist():
                rows = torch.nonzero(batch.sample_BS[row] == number).flatten()
                first = int(batch.replay_start_BS[row, rows[0]])
                if number < 0 or first == batch.ids_BS.shape[1]:
                    continue
                found += 1
                at = int(batch.segment_start_BS[row, rows[0]])
                assert first % 2 == 0
                assert first - at > window
                again = batch.ids_BS[row, first : first + window]
                assert (again == batch.ids_BS[row, first - window : first]).all()
                assert (batch.targets_BS[row, first : first + window] == -1).all()
                # without the repeated rows the sample is what its source made: each target is the next token
                ids = torch.cat([batch.ids_BS[row, at:first], batch.ids_BS[row, first + window : int(rows[-1]) + 1]])
                targets = torch.cat(
                    [batch.targets_BS[row, at:first], batch.targets_BS[row, first + window : int(rows[-1]) + 1]]
                )
                learnt = torch.nonzero(targets >= 0).flatten()
                assert (targets[learnt] == ids[learnt + 1]).all()
                floor = batch.window_floor_BS[row, rows]
                assert (floor <= rows).all()
    assert found > 8


def test_floors_move_with_the_rows_they_name() -> None:
    ids = np.arange(40, dtype=np.uint16)
    floor = np.array([0] * 22 + [22] * 18, np.int32)
    rows, _, moved = _repeated(ids, ids.astype(np.int32), floor, 30, 16)
    assert rows.tolist() == [*range(30), *range(14, 30), *range(30, 40)]
    # before the cut they stay; row 38 is position 22 run again, and every row from it on starts there
    assert moved.tolist() == [0] * 22 + [22] * 8 + [0] * 8 + [38] * 18
