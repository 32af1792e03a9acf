"""A draft is trained, calibrated and written beside a target that stays as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cedar.chat.tokenizer import EOS, Tokenizer
from cedar.checkpoint.read import read_checkpoint, read_draft
from cedar.checkpoint.write import write_checkpoint
from cedar.config.load import load_config, override
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError, FormatError
from cedar.train import draft as drafts
from cedar.train import draft_text
from cedar.train.draft import Blocks, DraftTrainConfig, Forced, Outcomes
from cedar.train.run import new_model
from tests.train.conftest import tiny_recipe

TINY = DraftTrainConfig(
    blocks=2, sequences=20, lengths=(64,), steps=4, rows=3, anchors=4, experts=2, experts_per_token=1, markov_rank=32,
    log_every=2, save_every=100,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a model folder with random weights, a data folder without corpora)."""
    root = tmp_path_factory.mktemp("draft")
    write_checkpoint(new_model(tiny_recipe(), tokenizer, torch.device("cpu")), root / "model")
    tokenizer.save(root / "model")
    (root / "data").mkdir()
    tokenizer.save(root / "data")
    return root / "model", root / "data"


@pytest.fixture(scope="module")
def trained(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    facts = drafts.train_draft(*folders, out, TINY, device="cpu", report=lambda line: None)
    assert facts["steps"] == 4
    return out


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name).view(torch.uint8) for name in opened.keys()}  # noqa: SIM118
    return tensors


def test_the_backbone_comes_out_as_it_went_in(folders: tuple[Path, Path], trained: Path) -> None:
    before, after = _tensors(folders[0]), _tensors(trained / "model")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert {name.split(".")[0] for name in set(after) - set(before)} == {"mtp"}
    assert load_config(trained / "model").draft.num_blocks == 2


def test_a_written_draft_reads_back(trained: Path) -> None:
    model = read_checkpoint(trained / "model")
    draft = read_draft(trained / "model", model)
    assert draft is not None
    # trained weights moved away from zero, where the confidence head begins
    assert draft.mtp[-1].confidence_head.proj.weight.abs().max() > 0
    with pytest.raises(FormatError, match="not the checkpoint of the model"):
        read_draft(trained / "model", new_model(tiny_recipe(), Tokenizer.load(trained / "model"), torch.device("cpu")))


def test_what_was_measured_is_beside_the_weights(trained: Path) -> None:
    facts = json.loads((trained / "model" / "training.json").read_text())["draft"]
    assert set(facts["measured"]["acceptance"]) == set(draft_text.KINDS)
    sampling = json.loads((trained / "model" / "generation_config.json").read_text())
    temperatures = sampling["draft_confidence_temperatures"]
    assert {name: len(values) for name, values in temperatures.items()} == {"sampled": 5, "greedy": 5}


def test_a_stopped_run_goes_on_bit_for_bit(folders: tuple[Path, Path], trained: Path, tmp_path: Path) -> None:
    run = override(TINY, ["steps=2"])
    # two of four steps: the plan's length decides the learning rate, so it stays
    trainer_steps: list[int] = []
    real = drafts.Trainer.fit_step

    class Stop(Exception):
        pass

    def stopping(self: drafts.Trainer) -> Tensor:
        if self.step == run.steps and not trainer_steps:
            trainer_steps.append(self.step)
            self.save()
            raise Stop
        return real(self)

    drafts.Trainer.fit_step = stopping  # type: ignore[method-assign]
    try:
        with pytest.raises(Stop):
            drafts.train_draft(*folders, tmp_path, TINY, device="cpu", report=lambda line: None)
        drafts.train_draft(*folders, tmp_path, TINY, device="cpu", report=lambda line: None)
    finally:
        drafts.Trainer.fit_step = real  # type: ignore[method-assign]
    ours, theirs = _tensors(tmp_path / "model"), _tensors(trained / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_model_or_other_options_are_refused(folders: tuple[Path, Path], trained: Path) -> None:
    with pytest.raises(FormatError, match="another run"):
        drafts.train_draft(*folders, trained, override(TINY, ["decay=2.0"]), device="cpu", report=lambda line: None)
    with pytest.raises(FormatError, match="other options"):
        drafts.train_draft(*folders, trained, override(TINY, ["seed=2"]), device="cpu", report=lambda line: None)
    with pytest.raises(ConfigError, match="at least 48"):
        DraftTrainConfig(lengths=(32,))


def test_text_marks_what_the_target_chose(folders: tuple[Path, Path], trained: Path, tokenizer: Tokenizer) -> None:
    (file,) = trained.glob("text-*.safetensors")
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    text = draft_text.load_text(file, about)
    model = read_checkpoint(folders[0])
    window = model.config.attention.sliding_window
    assert text.made_NL.any(-1).all() and not text.made_NL[:, 0].any()
    assert text.held_out_N.sum() == 2
    greedy = int((text.temperature_N == 0).nonzero()[0])
    # the likeliest token at every place that the target wrote, as a whole pass sees it
    first = int(text.made_NL[greedy].nonzero()[0])
    stop = (
        int((text.ids_NL[greedy] == tokenizer.special[EOS]).nonzero()[0])
        if bool((text.ids_NL[greedy] == tokenizer.special[EOS]).any())
        else text.ids_NL.shape[1]
    )
    output = model(text.ids_NL[greedy : greedy + 1], window_floor_BS=text.floor_NL[greedy : greedy + 1])
    likeliest = output.logits_BSV[0].argmax(-1)
    assert text.floor_NL[greedy, first] == max(0, first - window)
    same = (likeliest[first - 1 : stop - 1] == text.ids_NL[greedy, first:stop]).float().mean()
    assert same > 0.95


def test_losses_are_those_of_the_report() -> None:
    """One block of two places, computed by hand; the second block ends after its first place."""
    logits = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], [[0.0, 0.0, 1.0], [5.0, 0.0, 0.0]]])
    target = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]], [[0.0, 0.0, 1.0], [0.0, 0.0, 9.0]]])
    valid = torch.tensor([[True, True], [True, False]])
    label = torch.tensor([[1, 1], [2, 0]])
    confidence = torch.tensor([[0.3, -0.2], [0.0, 0.0]])
    none = torch.empty(0)
    blocks = Blocks(none, none, label, none, valid, none, none, target)
    ce, l1, conf, acceptance = drafts.losses(Forced(logits, confidence, none), blocks, decay=4.0)
    weights = [1.0, math.exp(-0.25), 1.0]
    q = [logits[0, 0].softmax(-1), logits[0, 1].softmax(-1), logits[1, 0].softmax(-1)]
    p = [target[0, 0].softmax(-1), target[0, 1].softmax(-1), target[1, 0].softmax(-1)]
    distances = [float((a - b).abs().sum()) for a, b in zip(q, p, strict=True)]
    total = sum(weights) + 1e-6
    labels = [1, 1, 2]
    want_ce = sum(-w * math.log(float(a[i])) for w, a, i in zip(weights, q, labels, strict=True)) / total
    assert float(ce) == pytest.approx(want_ce, rel=1e-5)
    assert float(l1) == pytest.approx(sum(w * d for w, d in zip(weights, distances, strict=True)) / total, rel=1e-5)
    kept = [1 - d / 2 for d in distances]
    said = [1 / (1 + math.exp(-x)) for x in (0.3, -0.2, 0.0)]
    want = sum(-w * (k * math.log(s) + (1 - k) * math.log(1 - s)) for w, k, s in zip(weights, kept, said, strict=True))
    assert float(conf) == pytest.approx(want / total, rel=1e-5)
    assert float(acceptance) == pytest.approx((kept[0] + kept[2]) / 2, rel=1e-5)


def test_blocks_never_cross_what_the_target_wrote(folders: tuple[Path, Path], trained: Path) -> None:
    model = read_checkpoint(trained / "model")
    draft = read_draft(trained / "model", model)
    assert draft is not None
    (file,) = trained.glob("text-*.safetensors")
    with safe_open(file, "pt") as opened:
        text = draft_text.load_text(file, opened.metadata())
    features = drafts.extract(model, model.config, text)
    rows = torch.arange(4)
    place = torch.arange(64).expand(4, -1)
    blocks = drafts.blocks_at(draft, features, rows, place, Rounding())
    for number in range(0, 4 * 64, 7):
        row, at = int(blocks.row_A[number]), int(blocks.position_A[number])
        free = True
        for k in range(5):
            free = free and bool(text.made_NL[row, at]) and at + 1 + k < 64 and bool(text.made_NL[row, at + 1 + k])
            assert bool(blocks.valid_AG[number, k]) == free
        floor = int(text.floor_NL[row, at])
        window = model.config.attention.sliding_window
        seen = [at - window + j for j in range(window) if blocks.visible_AW[number, j]]
        assert seen == list(range(max(floor, at - window), at))


def test_a_block_depends_on_its_own_sequence_alone(trained: Path) -> None:
    """Other rows of the batch change, the block's logits do not; nor do tokens behind its anchor."""
    model = read_checkpoint(trained / "model")
    draft = read_draft(trained / "model", model)
    assert draft is not None
    (file,) = trained.glob("text-*.safetensors")
    with safe_open(file, "pt") as opened:
        text = draft_text.load_text(file, opened.metadata())
    features = drafts.extract(model, model.config, text)
    anchors = torch.tensor([[40, 50]])

    def logits(rows: list[int]) -> Tensor:
        row_N = torch.tensor(rows)
        with torch.no_grad():
            blocks = drafts.blocks_at(draft, features, row_N, anchors.expand(len(rows), -1), Rounding())
            return drafts.run_blocks(draft, features, blocks, Rounding()).logits_AGV[:2]

    want = logits([5])
    assert torch.allclose(logits([5, 7, 9]), want, atol=1e-4)
    features.taps_NLX[5, 40:] = 7.0
    features.text.ids_NL[5, 46:] = 3
    assert torch.allclose(logits([5])[0], want[0], atol=1e-4)
    assert not torch.allclose(logits([5])[1], want[1], atol=1e-4)


def test_calibration_finds_the_temperatures_that_were_hidden() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20000, 3, generator=generator) * 1.5
    kept = torch.rand(20000, 3, generator=generator) < torch.sigmoid(true)
    hidden = torch.tensor([0.5, 2.0, 1.0])
    valid = torch.ones(20000, 3, dtype=torch.bool)
    found = drafts.calibrate(true * hidden, kept.float(), valid)
    assert found == pytest.approx(hidden.tolist(), rel=0.25)
    assert max(drafts.errors_of(true * hidden, kept.float(), valid, found)) < 0.015
    assert max(drafts.errors_of(true * hidden, kept.float(), valid, [1.0] * 3)) > 0.03
    assert drafts.calibration_error(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.0])) == pytest.approx(0.4)


def test_rounds_walk_from_bonus_to_bonus() -> None:
    """Places 0..5 of one row: two accepted, then none, then the block reaches past the end and is left out."""
    agreed = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]]).float()
    valid = torch.ones(6, 3, dtype=torch.bool)
    valid[5, 2] = False
    none = torch.empty(0)
    found = Outcomes(none, none, agreed, valid, none, none, torch.zeros(6), torch.arange(6))
    # 0 -> +3 -> 3 -> +1 -> 4 -> +2 -> 6
    assert drafts.greedy_rounds(found, torch.ones(6, dtype=torch.bool)) == (6, 3)
