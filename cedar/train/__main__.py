"""`python -m cedar.train`: the training commands with nothing but torch, numpy, safetensors and tokenizers.

For a machine that has a GPU and little else; `cedar train` and `cedar eval` call the same functions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cedar.errors import CedarError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cedar.train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="train, or go on with, a run")
    run.add_argument("recipe", type=Path, help="a TOML recipe, recipes/micro.toml for example")
    run.add_argument("--run", type=Path, required=True, help="folder of the run")
    run.add_argument("--data", help="prepared data folder, instead of the recipe's")
    run.add_argument("--device", choices=("cpu", "cuda"))
    run.add_argument("--minutes", type=float, help="time budget of the whole run, over all commands")
    run.add_argument("--stop-after", type=float, help="minutes after which this command saves and ends")
    run.add_argument("--from", dest="start_from", type=Path, help="model folder or weight shards to begin from")
    run.add_argument("--tensorboard", action="store_true", help="write the log for TensorBoard too")
    run.add_argument("--set", dest="changes", action="append", default=[], metavar="A.B=C")
    run.add_argument("--profile", type=int, default=0, metavar="STEPS", help="only time so many steps, and where")

    pack = commands.add_parser("pack", help="collect what a run made into a few files")
    pack.add_argument("--run", type=Path, required=True)
    pack.add_argument("--out", type=Path, required=True)

    for name, about in (
        ("draft", "train a draft for a model, from text that the model writes itself"),
        ("draft-text", "only let the model write that text"),
    ):
        draft = commands.add_parser(name, help=about)
        draft.add_argument("--model", type=Path, required=True, help="folder of the target")
        draft.add_argument("--data", type=Path, required=True, help="prepared data folder, for prompts")
        draft.add_argument("--out", type=Path, required=True, help="folder of the run")
        draft.add_argument("--device", choices=("cpu", "cuda"))
        draft.add_argument("--set", dest="changes", action="append", default=[], metavar="NAME=VALUE")
        if name == "draft":
            draft.add_argument("--minutes", type=float, help="time for training, over all commands of the run")
            draft.add_argument("--stop-after", type=float, help="minutes after which this command saves and ends")
            draft.add_argument("--held-out", type=int, default=256, metavar="SEQUENCES", help="measured of each length")

    recall = commands.add_parser("recall", help="recall far back in the context, and its random control")
    recall.add_argument("model", type=Path)
    recall.add_argument("--length", type=int)
    recall.add_argument("--documents", type=int, default=32)
    recall.add_argument("--questions", type=int)
    recall.add_argument("--seed", type=int, default=0)

    whole = commands.add_parser("eval", help="measure everything; one JSON and one HTML file")
    whole.add_argument("--model", type=Path, required=True)
    whole.add_argument("--data", type=Path, help="prepared data folder, for held-out text and chats")
    whole.add_argument("--out", type=Path, required=True)
    whole.add_argument("--device", choices=("cpu", "cuda"))
    whole.add_argument("--quick", action="store_true", help="a minute's worth")
    whole.add_argument("--card", action="store_true", help="put the numbers into the model's card")
    whole.add_argument("--length", type=int, action="append", default=[], help="tokens of retrieval documents; repeat")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 2 with a message on what the user can cause."""
    given = _parser().parse_args(arguments)
    # the loader's workers are forked, and the tokenizer's threads do not survive that
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from cedar.config.train import load_train_config
    from cedar.train import run as runs

    try:
        if given.command == "run":
            changes = [*given.changes, *([f'data.folder="{given.data}"'] if given.data else [])]
            config = load_train_config(given.recipe, changes)
            if given.profile:
                print(runs.profile(config, device=given.device, steps=given.profile), flush=True)
                return 0
            runs.train(
                config,
                given.run,
                device=given.device,
                minutes=given.minutes,
                stop_after=given.stop_after,
                start_from=given.start_from,
                tensorboard=given.tensorboard,
                report=lambda line: print(line, flush=True),
            )
        elif given.command.startswith("draft"):
            _draft(given)
        elif given.command == "pack":
            for file in runs.pack(given.run, given.out):
                print(f"{file} {file.stat().st_size:,} bytes")
        elif given.command == "eval":
            runs.evaluate_all(
                given.model,
                given.out,
                data=given.data,
                quick=given.quick,
                lengths=given.length,
                card=given.card,
                device=given.device,
                report=lambda line: print(line, flush=True),
            )
        else:
            result = runs.evaluate_recall(
                given.model, length=given.length, count=given.documents, questions=given.questions, seed=given.seed
            )
            print(json.dumps(result, indent=1))
    except CedarError as error:
        print(f"cedar.train: {error}", file=sys.stderr)
        return 2
    return 0


def _draft(given: argparse.Namespace) -> None:
    from cedar.config.load import override
    from cedar.train import draft

    run = override(draft.DraftTrainConfig(), given.changes)
    report = lambda line: print(line, flush=True)  # noqa: E731
    if given.command == "draft-text":
        draft.write_texts(given.model, given.data, given.out, run, device=given.device, report=report)
        return
    draft.train_draft(
        given.model,
        given.data,
        given.out,
        run,
        device=given.device,
        minutes=given.minutes,
        stop_after=given.stop_after,
        held_out_sequences=given.held_out,
        report=report,
    )


if __name__ == "__main__":
    sys.exit(main())
