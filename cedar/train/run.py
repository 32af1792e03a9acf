"""Whole runs: train from a recipe, export what came out, measure it."""

from __future__ import annotations

import json
import shutil
import statistics
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cedar.chat.tokenizer import Tokenizer, train_tokenizer
from cedar.checkpoint.read import read_checkpoint
from cedar.checkpoint.resume import load_newest, load_weights, save_weights
from cedar.checkpoint.write import write_checkpoint
from cedar.config.load import override
from cedar.config.model import ModelConfig
from cedar.config.presets import preset
from cedar.config.train import TrainConfig, train_config_from_dict, train_config_to_dict
from cedar.errors import ConfigError, FormatError
from cedar.model.engram import EngramTable
from cedar.model.init import initialise
from cedar.model.transformer import Transformer
from cedar.train import evaluate
from cedar.train.board import Board
from cedar.train.card import model_card
from cedar.train.corpus import Corpus, open_corpus
from cedar.train.data import Batch, Batches, load_corpora
from cedar.train.loop import Clock, Trainer
from cedar.train.page import gates, page, summary
from cedar.train.speed import peak_flops, trained_token_flops
from cedar.train.suite import Suite, effort_for, load_validation
from cedar.train.tasks import sample_text

_MODEL_FOLDER = "model"
# beside weight shards: the run that made them
_FACTS = "run.json"
# a model this small wanders at temperature 1, and was never shown a thought
_GENERATION = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 256, "thinking": False}


def open_data(config: TrainConfig) -> tuple[Tokenizer, dict[str, Corpus]]:
    """The recipe's tokenizer and corpora; a recipe of tasks alone needs no folder.

    Raises:
        FormatError: A corpus is missing, damaged, or of another tokenizer.
    """
    folder = Path(config.data.folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder)
        return tokenizer, load_corpora(folder, tokenizer, "train")
    return train_tokenizer([sample_text(config.seed, 4000)], preset(config.preset).vocab_size), {}


def model_config(config: TrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The recipe's shape with the tokenizer's Engram vocabulary.

    Raises:
        ConfigError: The tokenizer has another number of tokens than the preset.
    """
    shape = preset(config.preset)
    if len(tokenizer) != shape.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, preset {config.preset!r} has vocab_size {shape.vocab_size}: "
            f"prepare the data with --vocab-size {shape.vocab_size}"
        )
    compressed = tokenizer.compressed_map()[1]
    return override(shape, [f"engram.compressed_vocab_size={compressed}", *config.model])


def new_model(config: TrainConfig, tokenizer: Tokenizer, device: torch.device) -> Transformer:
    """A model with random weights, float32 masters, and the tokenizer's token map."""
    model = Transformer(model_config(config, tokenizer), device=device)
    initialise(model, config.seed)
    model.token_map.set(tokenizer.compressed_map()[0])
    return model


def train(
    config: TrainConfig,
    run: str | Path,
    *,
    device: str | None = None,
    minutes: float | None = None,
    stop_after: float | None = None,
    start_from: str | Path | None = None,
    tensorboard: bool = False,
    report: Callable[[str], None] = print,
) -> bool:
    """Train, or go on with, the run in a folder; when it is complete, export and evaluate it.

    Args:
        device: `cuda` or `cpu`; a GPU if there is one.
        minutes: Budget of the whole run over all its commands; replaces the recipe's steps.
        stop_after: Minutes after which this command saves and ends.
        start_from: What a new run begins from: a model folder, or weight shards that `pack` left.
        tensorboard: Write what is logged for TensorBoard too, into `RUN/tensorboard`.

    Returns:
        True if the run is complete.

    Raises:
        ConfigError: The tokenizer or a mixture does not fit the recipe, or tensorboard is not installed.
        FormatError: A corpus or a checkpoint is damaged or belongs to something else.
    """
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer, corpora = open_data(config)
    model = new_model(config, tokenizer, where)
    if start_from is not None:
        _take_weights(model, _starting_weights(Path(start_from)))
    batches = Batches(config, tokenizer, corpora, window=model.config.attention.sliding_window)
    clock = Clock(minutes=minutes, stop_after=stop_after)
    board = Board(run) if tensorboard else None
    watch = None if board is None else board.add
    trainer = Trainer(config, model, batches, run, clock=clock, report=report, watch=watch)
    if start_from is not None:
        trainer.earlier = _earlier(Path(start_from))
    state = trainer.optimizers.state_bytes()
    count = sum(p.numel() for p in model.parameters())
    report(
        f"{config.preset}: {count / 1e6:.2f} M parameters, optimiser state {sum(state.values()) / 1e6:.1f} MB "
        f"({', '.join(f'{name} {size / 1e6:.1f}' for name, size in state.items())}), {where}, "
        f"{config.rows * config.row_tokens:,} tokens a step"
    )
    if trainer.resume():
        report(f"resumed at step {trainer.step}")
    (run / "recipe.json").write_text(json.dumps(train_config_to_dict(config), indent=1) + "\n", encoding="utf-8")
    tokenizer.save(run)
    with board or nullcontext():
        complete = trainer.run(_probe(trainer, tokenizer, corpora) if config.eval_every else None)
    draw_curve(run)
    if complete:
        describe(export(run, report=report), config, report=report)
    else:
        report(f"stopped at step {trainer.step}; the same command goes on from there")
    return complete


def _starting_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Float weights by parameter name, of a model folder or of shards."""
    if not (folder / "config.json").is_file():
        return load_weights(folder)
    model = read_checkpoint(folder)
    for module in model.modules():
        if isinstance(module, EngramTable):
            module.unpack()
    return model.state_dict()


def _run_facts(meta: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What `training.json` says of one run, from its checkpoint."""
    return {
        "recipe": meta["config"],
        "steps": steps,
        "tokens": meta["tokens_seen"],
        "minutes": round(meta["elapsed_s"] / 60, 1),
        "device": meta["device"],
    }


def _earlier(folder: Path) -> list[dict[str, Any]]:
    """Facts of the runs that made the weights in a folder, first to last; empty if it does not say."""
    file = next((folder / name for name in (_FACTS, "training.json") if (folder / name).is_file()), None)
    if file is None:
        return []
    facts = json.loads(file.read_text(encoding="utf-8"))
    own = {name: facts[name] for name in ("recipe", "steps", "tokens", "minutes", "device")}
    return [*facts.get("earlier", ()), own]


def _take_weights(model: Transformer, weights: dict[str, torch.Tensor]) -> None:
    own = model.state_dict()
    if set(own) != set(weights) or any(own[name].shape != weights[name].shape for name in own):
        raise FormatError(
            "the weights to begin from belong to another model config; use the recipe they were trained with"
        )
    model.load_state_dict(weights)


def _probe(trainer: Trainer, tokenizer: Tokenizer, corpora: dict[str, Corpus]) -> Callable[[], dict[str, Any]]:
    """Recall at the trained length, and held-out text if there is some: seconds, between steps."""
    config, model = trainer.config, trainer.model
    # a shorter text has no room for records and a question
    length = max(128, config.trained_length)
    questions = min(4, 1 + length // 128)
    far = min(evaluate.reach(model), (length - 26 * questions) // 3)
    validation = load_corpora(config.data.folder, tokenizer, "validation").get("stories") if corpora else None
    # the probe asks what the evaluation asks: names that training never joined
    lookups = evaluate.documents(
        trainer.batches.tasks, length=length, count=16, questions=questions, skip_last=far, seed=1
    )

    def run() -> dict[str, Any]:
        answers = evaluate.ask_whole(model, tokenizer, lookups, compute_dtype=trainer.compute_dtype)
        exact = sum(answer.exact for answer in answers) / len(answers)
        tokens = sum(a.right_tokens for a in answers) / sum(a.num_tokens for a in answers)
        values: dict[str, Any] = {"probe_recall": round(exact, 3), "probe_token_recall": round(tokens, 3)}
        if validation is not None:
            values |= evaluate.text(
                model, tokenizer, validation, length=length, max_tokens=16 * length, compute_dtype=trainer.compute_dtype
            )
        trainer.report("probe: " + "  ".join(f"{k} {v}" for k, v in values.items() if k != "corpus"))
        return values

    return run


def export(run: str | Path, *, report: Callable[[str], None] = print) -> Path:
    """Write a run's newest checkpoint as a model folder in the release's format, its tokenizer beside it.

    Raises:
        FormatError: The run has no whole checkpoint.
    """
    run = Path(run)
    state, _ = load_newest(run / "checkpoints")
    if state is None:
        raise FormatError(f"{run} holds no checkpoint to export; train it first")
    config = train_config_from_dict(state.meta["config"])
    tokenizer = Tokenizer.load(run)
    model = new_model(config, tokenizer, torch.device("cpu"))
    model.load_state_dict(dict(state.model))
    log = run / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    losses = [line["loss"] for line in lines if "loss" in line][-20:]
    folder = run / _MODEL_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(model, folder)
    tokenizer.save(folder)
    facts = {
        **_run_facts(state.meta, state.step),
        "earlier": state.meta.get("earlier", []),
        "final_loss": round(statistics.fmean(losses), 4) if losses else None,
        "shortest_length": min(length for stage in config.stages for length in stage.lengths),
        "trained_length": config.trained_length,
        "held_out_names": config.data.held_out_names,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(_GENERATION, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    report(f"model written to {folder} ({size / 1e6:.1f} MB)")
    return folder


def describe(
    folder: Path, config: TrainConfig, *, count: int = 32, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure an exported model and write what came out into its training.json and its card.

    Returns:
        What training.json says.
    """
    model, tokenizer, facts = load_model(folder)
    facts["recall"] = evaluate_recall(folder, length=None, count=count, questions=None, seed=0)
    file = Path(config.data.folder) / "stories" / "validation"
    if file.is_dir():
        facts["text"] = evaluate.text(model, tokenizer, open_corpus(file, tokenizer), length=config.trained_length)
    _write_card(folder, model.config, facts)
    recall = facts["recall"]
    report(
        f"recall {recall['accuracy']:.3f}, with random selection {recall['accuracy_random_selection']:.3f} "
        f"at {recall['length']} tokens ({recall['seconds']:.0f} s)"
    )
    return facts


def _write_card(folder: Path, config: ModelConfig, facts: dict[str, Any]) -> None:
    """training.json and the card that is made of it."""
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    card = model_card(
        facts,
        parameters=sum(p.numel() for p in Transformer(config, device="meta").parameters()),
        size_bytes=sum(weights.stat().st_size for weights in folder.glob("*.safetensors")),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def pack(run: str | Path, out: str | Path) -> list[Path]:
    """What a run made, in a few files to carry away: the model as one tar, weights to go on from, log and curve."""
    run, out = Path(run), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    state, _ = load_newest(run / "checkpoints")
    if state is None:
        raise FormatError(f"{run} holds no checkpoint; train it first")
    files = save_weights(out, state.model)
    facts = {**_run_facts(state.meta, state.step), "earlier": state.meta.get("earlier", [])}
    files.append(out / _FACTS)
    files[-1].write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for name in ("log.jsonl", "curve.png", "recipe.json"):
        if (run / name).is_file():
            files.append(Path(shutil.copy(run / name, out / name)))
    if (run / _MODEL_FOLDER).is_dir():
        files.append(out / "model.tar")
        with tarfile.open(files[-1], "w") as archive:
            for file in sorted((run / _MODEL_FOLDER).iterdir()):
                archive.add(file, arcname=f"{_MODEL_FOLDER}/{file.name}")
    return files


def profile(config: TrainConfig, *, device: str | None = None, steps: int = 10) -> str:
    """Time of a step in each stage, dense and sparse, and the operations that take it longest."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer, corpora = open_data(config)
    model = new_model(config, tokenizer, where)
    batches = Batches(config, tokenizer, corpora, window=model.config.attention.sliding_window)
    trainer = Trainer(config, model, batches, "profile")
    flops, peak = trained_token_flops(model.config, config), peak_flops(where)
    lines = []

    def run(batch: Batch, count: int) -> float:
        if where.type == "cuda":
            torch.cuda.synchronize()
        started = time.monotonic()
        for _ in range(count):
            trainer.train_step(batch)
        if where.type == "cuda":
            torch.cuda.synchronize()
        return (time.monotonic() - started) / count

    for stage, values in enumerate(config.stages):
        started = time.monotonic()
        made = batches.batch(stage, stage)
        making = time.monotonic() - started
        for dense in (True, False):
            batch = replace(made, dense=dense)
            run(batch, 2)
            seconds = run(batch, steps)
            tokens_s = config.rows * config.row_tokens / seconds
            mfu = f"MFU {flops * tokens_s / peak:.2%}   " if peak else ""
            lines.append(
                f"{values.name:10} {'dense' if dense else 'top-k':6} {seconds * 1e3:8.1f} ms a step "
                f"{tokens_s:12,.0f} tok/s   {mfu}batch made in {making * 1e3:.1f} ms"
            )
    if where.type == "cuda":
        lines.append(f"most memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if where.type == "cuda" else []
    for dense in (True, False):
        batch = replace(batches.batch(0, len(config.stages) - 1 if not dense else 0), dense=dense)
        with torch.profiler.profile(activities=activities) as profiler:
            run(batch, 1)
        key = "self_cuda_time_total" if where.type == "cuda" else "self_cpu_time_total"
        averages = profiler.key_averages()
        calls = sum(event.count for event in averages if event.key.startswith(("cudaLaunch", "cuLaunch")))
        lines.append(f"{'dense' if dense else 'top-k'} step: {calls} kernel launches")
        lines.append(averages.table(sort_by=key, row_limit=25, max_name_column_width=60))
    return "\n".join(lines)


def draw_curve(run: str | Path) -> Path | None:
    """The run's losses and probes as `curve.png`; None where matplotlib is not installed or nothing was logged."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    lines = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    if not steps:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for dense, label in ((True, "all entries visible"), (False, "top-k entries")):
        chosen = [line for line in steps if line["dense"] is dense]
        left.plot([s["step"] for s in chosen], [s["loss"] for s in chosen], ".", markersize=2, label=label)
    left.set_xlabel("step")
    left.set_ylabel("loss, nats a token")
    left.legend()
    probes = [line for line in lines if "probe_recall" in line]
    right.plot([p["step"] for p in probes], [p["probe_recall"] for p in probes], label="recall of held-out names")
    measured = [line for line in steps if line["index_recall"] is not None]
    right.plot(
        [s["step"] for s in measured], [s["index_recall"] for s in measured], ".", markersize=3, label="indexer recall"
    )
    right.set_xlabel("step")
    right.set_ylim(0, 1)
    right.legend()
    figure.tight_layout()
    file = Path(run) / "curve.png"
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return file


def load_model(folder: str | Path, *, device: str = "cpu") -> tuple[Transformer, Tokenizer, dict[str, Any]]:
    """A model folder (bfloat16 on a GPU), its tokenizer, and what `training.json` says of it (empty if it has none)."""
    folder = Path(folder)
    model = read_checkpoint(folder, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    file = folder / "training.json"
    facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return model, Tokenizer.load(folder), facts


def evaluate_all(
    folder: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    quick: bool = False,
    lengths: Sequence[int] = (),
    device: str | None = None,
    card: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure everything about a model folder; writes `evaluation.json` and `evaluation.html` into `out`.

    Args:
        data: A prepared data folder, whose held-out corpora are scored; without one, generated text alone is.
        lengths: Of the retrieval documents, instead of the device's usual ones.
        card: Put what was found into the model's training.json and card too.

    Raises:
        FormatError: The model or the data is not what it should be.
        ConfigError: A length is too short.
    """
    out = Path(out)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    effort = effort_for(where, quick=quick, lengths=lengths)
    model, tokenizer, facts = load_model(folder, device=where)
    validation = {} if data is None else load_validation(data, tokenizer)
    out.mkdir(parents=True, exist_ok=True)

    def save(found: dict[str, Any]) -> None:
        (out / "evaluation.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    results = Suite(model, tokenizer, facts, validation, effort, report=report).run(save)
    html = page(results, title=f"Evaluation of {Path(folder).resolve().name}")
    (out / "evaluation.html").write_text(html, encoding="utf-8")
    if card:
        _write_card(Path(folder), model.config, {**facts, "evaluation": summary(results)})
    for gate in gates(results):
        report("  ".join((gate.name, *gate.told())))
    report(f"written to {out}/evaluation.json and {out}/evaluation.html")
    return results


def evaluate_text(folder: str | Path, corpus: str | Path, *, length: int, max_tokens: int) -> dict[str, Any]:
    """`evaluate.text` of a model folder on a prepared corpus. Raises FormatError."""
    model, tokenizer, _ = load_model(folder)
    held_out = open_corpus(corpus, tokenizer)
    return {"model": str(folder), **evaluate.text(model, tokenizer, held_out, length=length, max_tokens=max_tokens)}


def evaluate_recall(
    folder: str | Path, *, length: int | None, count: int, questions: int | None, seed: int
) -> dict[str, Any]:
    """`evaluate.recall` of a model folder at twice its trained length, or at `length`.

    Raises:
        ConfigError: The folder does not say its trained length and none is given.
    """
    model, tokenizer, facts = load_model(folder)
    if length is None:
        if "trained_length" not in facts:
            raise ConfigError(f"{folder} has no training.json with a trained_length: say --length")
        length = 2 * int(facts["trained_length"])
    held_out = int(facts.get("held_out_names", 8))
    result = evaluate.recall(
        model, tokenizer, length=length, count=count, questions=questions, seed=seed, held_out=held_out
    )
    return {"model": str(folder), "trained_length": facts.get("trained_length"), **result}
