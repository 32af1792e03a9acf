"""From a folder of text to a model folder, through the commands."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cedar.checkpoint.resume import load_newest
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError, FormatError
from cedar.train import run as runs
from cedar.train.card import model_card
from cedar.train.prepare import prepare
from cedar.train.tasks import sample_text
from tests.train.conftest import tiny_recipe

CHAT = {
    "source": "own",
    "messages": [
        {"role": "user", "content": "Where is the fox?"},
        {"role": "assistant", "content": "In the barn."},
        {"role": "user", "content": "And the dog?"},
        {"role": "assistant", "content": "Near the river."},
    ],
}


def write(folder: Path, split: str, *documents: dict[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}-0.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    texts = [{"id": str(i), "text": sample_text(i, 200)} for i in range(3)]
    write(root / "texts", "train", *texts)
    write(root / "texts", "validation", {"id": "v", "text": sample_text(9, 40)})
    write(root / "chats", "train", CHAT, CHAT)
    write(root / "chats", "validation", CHAT)
    infos = prepare(
        root / "out",
        texts={"stories": root / "texts"},
        chats=root / "chats",
        vocab_size=512,
        report=lambda line: None,
    )
    assert infos["stories/train"]["documents"] == 3
    assert infos["instruct/train"]["documents"] == 2
    return root / "out"


def test_chats_are_learnt_where_the_assistant_speaks(data: Path) -> None:
    tokenizer, corpora = runs.open_data(tiny_recipe(data={"folder": str(data)}))
    corpus = corpora["instruct"]
    assert corpus.learn is not None
    one = slice(int(corpus.starts[0]), int(corpus.starts[1]))
    learnt = tokenizer.decode(corpus.tokens[one][corpus.learn[one]].tolist())
    assert learnt == "In the barn.<｜end▁of▁sentence｜>Near the river.<｜end▁of▁sentence｜>"


def test_train_stop_go_on_export_pack(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"from": 256, "to": 512, "questions": 4, "accuracy": 0.5}
    measured = {
        "accuracy": 0.5,
        "accuracy_random_selection": 0.0,
        "length": 128,
        "seconds": 1.0,
        "questions": 4,
        "least_distance": 300,
        "reach_of_windows": 120,
        "by_distance": [step],
    }
    monkeypatch.setattr(runs, "evaluate_recall", lambda folder, **given: measured)
    stage = {"mixture": {"stories": 0.5, "instruct": 0.3, "pairs": 0.2}, "rounding": ["serving"]}
    config = tiny_recipe(data={"folder": str(data)}, stage=stage, steps=3, eval_every=2)
    said: list[str] = []
    assert not runs.train(config, tmp_path, device="cpu", stop_after=1e-9, report=said.append)
    assert "stopped at step 1" in said[-1]
    assert runs.train(config, tmp_path, device="cpu", report=said.append)
    assert "resumed at step 1" in said
    assert any(line.startswith("probe: probe_recall 0.0") and "bits_per_byte" in line for line in said)
    model, tokenizer, facts = runs.load_model(tmp_path / "model")
    assert facts["steps"] == 3
    assert facts["trained_length"] == 64
    assert facts["recall"] == measured
    assert facts["text"]["bits_per_byte"] > 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| as it serves | **50.0%** of 4 |" in card
    assert "3.3 million parameters" in card
    gates = [["n-gram loss", "0.050", "at most 0.150", "yes"], ["MQAR", "90.0%", "at least 95.0%", "no, by 5.0%"]]
    found = {
        "device": "a CPU",
        "gates": gates,
        "by_length": {"pass key": {"512": "100.0% of 10", "8192": "80.0% of 5"}},
    }
    told = model_card({**facts, "evaluation": found}, parameters=1, size_bytes=1)
    assert "| MQAR | 90.0% | at least 95.0% | no, by 5.0% |" in told
    assert "| 8,192 | 80.0% of 5 |" in told
    # what was trained with rounded weights is what was written
    state, _ = load_newest(tmp_path / "checkpoints")
    assert state is not None
    trained = runs.new_model(config, tokenizer, torch.device("cpu"))
    trained.load_state_dict(dict(state.model))
    ids = torch.tensor([tokenizer.encode("The red fox is in the barn.")])
    with torch.no_grad():
        want = trained(ids, rounding=replace(Rounding.none(), weights=True)).logits_BSV
        got = model(ids, rounding=Rounding.none()).logits_BSV
    assert torch.allclose(want, got, atol=1e-5)

    packed = {file.name: file for file in runs.pack(tmp_path, tmp_path / "packed")}
    assert {"model.tar", "log.jsonl", "weights-00001-of-00001.safetensors"} <= set(packed)
    with tarfile.open(packed["model.tar"]) as archive:
        assert "model/config.json" in archive.getnames()
    said.clear()
    assert runs.train(config, tmp_path / "next", device="cpu", start_from=tmp_path / "packed", report=said.append)
    # a model folder is a start as well: its packed tables become float ones again
    assert runs.train(config, tmp_path / "third", device="cpu", start_from=tmp_path / "model", report=said.append)
    with pytest.raises(FormatError, match="another model config"):
        other = replace(config, model=("moe.inner_size=96",))
        runs.train(other, tmp_path / "fourth", device="cpu", start_from=tmp_path / "model", report=said.append)
    # a run that begins from another's weights says so, and its card tells both
    facts = json.loads((tmp_path / "next" / "model" / "training.json").read_text())
    assert [(run["steps"], run["recipe"]["preset"]) for run in facts["earlier"]] == [(3, "nano")]
    card = (tmp_path / "next" / "model" / "README.md").read_text()
    assert "Then, from these weights, 3 steps" in " ".join(card.split())


def test_a_corpus_that_a_recipe_needs_must_be_there(tmp_path: Path) -> None:
    config = tiny_recipe(data={"folder": str(tmp_path)}, stage={"mixture": {"stories": 1.0}})
    with pytest.raises(ConfigError, match="'stories', which is neither"):
        runs.train(config, tmp_path / "run", device="cpu", report=lambda line: None)


def test_a_vocabulary_that_does_not_match(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(preset="micro", data={"folder": str(data)})
    with pytest.raises(ConfigError, match="512 tokens, preset 'micro' has vocab_size 1024"):
        runs.train(config, tmp_path, device="cpu", report=lambda line: None)


def test_texts_without_a_split_or_files(tmp_path: Path) -> None:
    write(tmp_path / "texts", "train", {"id": "a", "text": sample_text(1, 400)})
    with pytest.raises(FormatError, match="no validation files"):
        prepare(tmp_path / "out", texts={"stories": tmp_path / "texts"}, vocab_size=400, report=lambda line: None)


def test_python_m_runs_with_torch_alone(tmp_path: Path) -> None:
    """The command of a machine without typer, rich and zstandard."""
    recipe = Path(__file__).parents[2] / "recipes" / "nano-smoke.toml"
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'zstandard', 'msgspec', 'starlette', 'matplotlib'): sys.modules[name] = None\n"
        "from cedar.train.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "run", str(recipe), "--run", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--data", str(tmp_path), "--stop-after", "0.001"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "stopped at step 1" in done.stdout
    missing = subprocess.run([*command[:4], "none.toml", *command[5:]], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "cannot read the recipe" in missing.stderr
