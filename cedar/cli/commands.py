"""One function per subcommand, each a few calls into the packages.

Nothing is imported above that a command might not need: `cedar --help` and `cedar plan` load no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from cedar.cache.store import PageStore

app = typer.Typer(
    name="cedar",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def plan(
    preset: Annotated[str | None, typer.Option(help="A shape cedar knows: nano, micro, mini, small, flash.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json, or the checkpoint folder that holds one.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one field, for example indexer.topk=256.")
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(metavar="TOKENS", help="Context lengths: 4096, 64K, 1M. Repeat for more.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Device memory to fill, for example 24GiB.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw cache and FLOPs beside other models.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Bytes, parameters and FLOPs of a model, before it runs; `flash` if none is named."""
    from cedar.config.load import load_config, override
    from cedar.config.presets import preset as preset_config
    from cedar.errors import ConfigError
    from cedar.planner import fit, report

    if preset is not None and config is not None:
        raise ConfigError("--preset and --config both name a model: give one of them")
    from rich.console import Console

    console = Console()
    # a pipe has no width of its own
    console = console if console.is_terminal else Console(width=120)
    shape = preset_config(preset or "flash") if config is None else load_config(config)
    name = (preset or "flash") if config is None else str(config)
    contexts = report.DEFAULT_CONTEXTS if as_json or console.width >= 100 else report.NARROW_CONTEXTS
    asked = report.Plan(
        name=f"{name} (changed)" if change else name,
        config=override(shape, change or ()),
        contexts=tuple(fit.parse_tokens(text) for text in context) if context else contexts,
        memory_bytes=None if memory is None else fit.parse_bytes(memory),
    )
    if plot is not None:
        from cedar.planner.plot import draw

        draw(asked, plot)
    if as_json:
        import json

        print(json.dumps(report.as_json(asked), indent=2))
        return
    report.print_tables(asked, console)
    if plot is not None:
        print(f"figures: {plot}")


@app.command()
def inspect(
    target: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint folder, or `kernels` for what would run here and why.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """What a checkpoint holds, held against its config; ends with status 1 if something is wrong."""
    from rich.console import Console

    console = Console()
    console = console if console.is_terminal else Console(width=120, soft_wrap=True)
    if target == "kernels":
        from cedar.kernels.dispatch import ORDER, explain

        for device in ORDER:
            for op, backend, skipped in explain(device):
                print(f"{device:5} {op:22} {backend:10} {skipped}".rstrip())
        return
    from cedar.checkpoint import report
    from cedar.checkpoint.files import inspect_checkpoint

    files = inspect_checkpoint(target)
    if as_json:
        import json

        answer = report.as_json(files)
        print(json.dumps(answer, indent=2))
        sound = answer["sound"]
    else:
        sound = report.print_report(files, console)
    if not sound:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint folder.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Where to write it; SRC itself is fine.")],
    shard_size: Annotated[str, typer.Option(metavar="BYTES", help="Largest file, for example 500MB or 4GiB.")] = "4GiB",
) -> None:
    """Write a checkpoint anew: checked, config.json in the nested layout, files of another size."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from cedar.checkpoint import report
    from cedar.checkpoint.files import open_checkpoint, total_bytes
    from cedar.checkpoint.write import convert_checkpoint
    from cedar.planner.fit import parse_bytes

    files = open_checkpoint(source)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("convert", total=total_bytes(files))
        written = convert_checkpoint(
            files,
            destination,
            shard_bytes=parse_bytes(shard_size),
            progress=lambda num_bytes: progress.advance(task, num_bytes),
        )
    report.print_written(written, source, destination, Console())


MODEL = typer.Option(metavar="DIR", help="A model directory in the release's format, or `bundled`.")
TEMPERATURE = typer.Option(min=0, max=2, help="0 always takes the likeliest token; the model's default otherwise.")
SEED = typer.Option(help="Makes the choice of tokens repeatable.")
MAX_TOKENS = typer.Option(min=1, help="Longest answer in tokens.")
CONTEXT = typer.Option(metavar="TOKENS", help="Longest prompt plus answer; the model's limit otherwise.")


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; standard input if left out.")] = None,
    model: Annotated[str, MODEL] = "bundled",
    max_tokens: Annotated[int, MAX_TOKENS] = 200,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    seed: Annotated[int | None, SEED] = None,
) -> None:
    """Continue a text, streamed to standard output."""
    import sys

    from cedar.errors import RequestError

    if prompt is None:
        if sys.stdin.isatty():
            raise RequestError('there is no prompt: cedar generate "Once upon a time", or text on standard input')
        prompt = sys.stdin.read()
    if not prompt:
        raise RequestError('the prompt is empty: cedar generate "Once upon a time"')
    from cedar.llm import LLM

    with LLM(model) as llm:
        print(prompt, end="", flush=True)
        for piece in llm.stream_generate(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed):
            print(piece, end="", flush=True)
        print()


@app.command()
def chat(
    model: Annotated[str, MODEL] = "bundled",
    system: Annotated[str | None, typer.Option(help="First message: how the model should behave.")] = None,
    effort: Annotated[str | None, typer.Option(help="Reasoning effort: none, low, high, max, or 1 to 100.")] = None,
    max_tokens: Annotated[int | None, MAX_TOKENS] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    seed: Annotated[int | None, SEED] = None,
) -> None:
    """Talk to a model in the terminal."""
    from cedar.chat.effort import effort_number
    from cedar.cli.chat import converse
    from cedar.llm import LLM

    number = int(effort) if effort is not None and effort.isdecimal() else effort
    if number is not None:
        effort_number(number)
    with LLM(model) as llm:
        converse(llm, system=system, effort=number, max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command()
def serve(
    model: Annotated[str, MODEL] = "bundled",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its directory otherwise.")] = None,
    context: Annotated[int | None, CONTEXT] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Rows of a step, prompts and answers together; by the device."),
    ] = None,
    target_tpot: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time between tokens to keep: prompts make way for streams."),
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="Another name that clients may use; * takes any. Repeat for more.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Let only the keys of this file in; `cedar key` makes one.")
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open", help="Let other machines ask without a key; only for --host beyond this machine.")
    ] = False,
    drain: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long open answers may go on after SIGTERM or Ctrl-C.")
    ] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse unknown fields instead of warning.")] = False,
    emit_reasoning_alias: Annotated[
        bool,
        typer.Option("--emit-reasoning-alias", help="Send thoughts as `reasoning` too, for clients that read that."),
    ] = False,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log JSON objects, one a line, instead of lines for people.")
    ] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep conversations there across restarts; holds prompts.")
    ] = None,
    cache_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="Memory for cached and running tokens.")
    ] = "512MiB",
    cache_disk: Annotated[
        str, typer.Option(metavar="BYTES", help="What the files in --cache-dir may grow to.")
    ] = "8GiB",
    cache_day: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What may be written to --cache-dir in a day.")
    ] = None,
    cache_shared: Annotated[
        str | None, typer.Option(metavar="URL", help="Share pages through an object store: s3://, gs://, file:///.")
    ] = None,
    cache_host: Annotated[
        str, typer.Option(metavar="BYTES", help="Host memory for pages that leave a GPU or come from --cache-shared.")
    ] = "512MiB",
    exact_turns: Annotated[
        bool, typer.Option(help="An answer that a client sends back stands in the prompt as it was generated.")
    ] = True,
    engram: Annotated[
        str, typer.Option(metavar="PLACE", help="Engram's tables: in memory, in a GPU's host, mapped, or on disk.")
    ] = "memory",
    engram_cache: Annotated[str, typer.Option(metavar="BYTES", help="Memory for rows of tables on disk.")] = "256MiB",
    draft: Annotated[bool, typer.Option(help="Draft with the model's own draft, if it has one.")] = True,
    strict_cache: Annotated[
        bool, typer.Option("--strict-cache", help="A hit never changes an answer; slower.")
    ] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, and a page to talk to it."""
    import asyncio
    import logging
    import os
    import time

    from cedar.cli.requirements import check_memory, check_packages
    from cedar.config.serve import ServeConfig
    from cedar.engine.load import context_tokens, open_model, start_engine
    from cedar.planner.fit import parse_bytes
    from cedar.planner.kv import global_bytes_per_token, page_bytes
    from cedar.server.logs import set_up_logs
    from cedar.server.run import listen, serve

    set_up_logs(as_json=log_json)
    check_packages()
    files = open_model(model, name=name)
    config = ServeConfig(
        host=host,
        port=port,
        max_context=context,
        max_step_tokens=step_tokens,
        target_tpot_s=target_tpot,
        aliases=tuple(alias or ()),
        api_key_file=api_key_file,
        open_to_all=open_to_all,
        drain_s=drain,
        strict=strict,
        reasoning_alias=emit_reasoning_alias,
        cache_dir=cache_dir,
        cache_bytes=parse_bytes(cache_memory),
        cache_disk_bytes=parse_bytes(cache_disk),
        cache_day_bytes=None if cache_day is None else parse_bytes(cache_day),
        cache_shared=cache_shared,
        cache_host_bytes=parse_bytes(cache_host),
        exact_turn_replay=exact_turns,
        engram=cast(Any, engram),
        engram_cache_bytes=parse_bytes(engram_cache),
        draft=draft,
        strict_cache=strict_cache,
    )
    held = context_tokens(files, config)
    limit = files.config.max_position_embeddings if context is None else context
    short = f" ({cache_memory} of pages hold no more; --cache-memory)" if held < limit and context is None else ""
    needed = check_memory(files.config, config)
    listener = listen(config)
    began = time.monotonic()
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    body = f'{{"model": "{files.name}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'
    print(
        f"model    {files.name} ({files.path})\n"
        f"cache    {global_bytes_per_token(files.config):g} bytes a token, "
        f"context {held:,} tokens{short}\n"
        f"tiers    memory {cache_memory} ({config.cache_bytes // page_bytes(files.config):,} pages of 128 tokens), "
        f"disk {f'{cache_disk} in {cache_dir}' if cache_dir else 'none (--cache-dir DIR)'}\n"
        f"memory   about {sum(needed.values()) / 2**20:,.0f} MiB, weights {needed['weights'] / 2**20:,.0f} of them\n"
        f"page     {url}/\n"
        f"API      {url}/v1 (OpenAI), {url} (Anthropic)\n"
        f"try      curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        "loading the weights",
        flush=True,
    )
    asyncio.run(
        serve(
            files,
            config,
            listener,
            load=lambda: start_engine(files, config),
            on_ready=lambda: print(f"ready in {time.monotonic() - began:.1f} s; Ctrl-C ends", flush=True),
        )
    )
    print("stopped", flush=True)
    # taking torch apart takes a second, and a thread deep inside a native call would hold it up for longer
    logging.shutdown()
    os._exit(0)


cache = typer.Typer(no_args_is_help=True, help="Look into the disk tier of a model's cache.")
app.add_typer(cache, name="cache")
CACHE_DIR = typer.Argument(metavar="DIR", help="What `cedar serve --cache-dir` was given.")


CACHE_OF = typer.Option("--of", metavar="NUMERICS", help="Pages computed by cpu-float32 or by cuda-bfloat16.")


def _tier(model: str, directory: Path, numerics: str | None) -> PageStore:
    """The tier of a model; of the one kind of pages that there is, unless told."""
    from cedar.config.serve import ServeConfig
    from cedar.engine.load import NUMERICS, fingerprint, open_model, open_store
    from cedar.errors import ConfigError

    files = open_model(model)
    if numerics is None:
        there = [kind for kind in NUMERICS if (directory / fingerprint(files, kind).hex()[:32]).exists()]
        if len(there) > 1:
            raise ConfigError(f"{directory} holds pages of {' and '.join(there)}: choose with --of")
        numerics = there[0] if there else NUMERICS[0]
    return open_store(files, ServeConfig(cache_dir=directory), numerics=numerics, read_only=True)


@cache.command("ls")
def cache_ls(
    directory: Annotated[Path, CACHE_DIR],
    model: Annotated[str, MODEL] = "bundled",
    text: Annotated[bool, typer.Option("--text", help="Show how each page begins.")] = False,
    of: Annotated[str | None, CACHE_OF] = None,
) -> None:
    """The pages that are kept, one a line: key, tokens, bounded replays upstream, and whether it is pinned."""
    from cedar.engine.load import open_model

    tier, tokenizer = _tier(model, directory, of), open_model(model).tokenizer
    for page in tier.walk():
        # an image's positions carry the image above their id
        ids = [token % 2**32 for token in page.tokens[:24]]
        shown = f"  {tokenizer.decode(ids)!r}" if text else ""
        pinned = "  pinned" if page.pinned else ""
        print(f"{page.key.hex()}  {len(page.tokens):3} tokens  lineage {page.lineage}{pinned}{shown}")
    tier.close()


@cache.command("stats")
def cache_stats(
    directory: Annotated[Path, CACHE_DIR],
    model: Annotated[str, MODEL] = "bundled",
    of: Annotated[str | None, CACHE_OF] = None,
) -> None:
    """Pages, segments, snapshots and bytes."""
    tier = _tier(model, directory, of)
    for name, value in tier.describe().items():
        print(f"{name:15} {value:,}" if isinstance(value, int) else f"{name:15} {value}")
    tier.close()


@cache.command("verify")
def cache_verify(
    directory: Annotated[Path, CACHE_DIR],
    model: Annotated[str, MODEL] = "bundled",
    of: Annotated[str | None, CACHE_OF] = None,
) -> None:
    """Read every page and check it; broken ones are forgotten. Status 1 if there were any."""
    tier = _tier(model, directory, of)
    whole, broken = tier.verify()
    tier.close()
    print(f"{whole} whole, {broken} broken and forgotten")
    raise typer.Exit(int(broken > 0))


@cache.command("purge")
def cache_purge(
    directory: Annotated[Path, CACHE_DIR],
    model: Annotated[str, MODEL] = "bundled",
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned pages too.")] = False,
    of: Annotated[str | None, CACHE_OF] = None,
) -> None:
    """Forget every page, snapshot and turn of this model, and delete the files; pinned pages stay."""
    tier = _tier(model, directory, of)
    count = tier.purge(pinned=pinned)
    tier.close()
    print(f"{count} pages forgotten")


@cache.command("pin")
def cache_pin(
    directory: Annotated[Path, CACHE_DIR],
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="A chat request as JSON, or any text file.")],
    model: Annotated[str, MODEL] = "bundled",
    salt: Annotated[str, typer.Option(help="The request's cache_salt.")] = "",
    off: Annotated[bool, typer.Option("--off", help="Let the pages go again.")] = False,
    of: Annotated[str | None, CACHE_OF] = None,
) -> None:
    """Keep the pages that a request begins with: no budget and no purge takes them. Status 1 if there are none."""
    from cedar.cache.keys import root_key
    from cedar.chat.explain import read_prompt
    from cedar.engine.load import open_model

    files, tier = open_model(model), _tier(model, directory, of)
    prompt = read_prompt(request, files.tokenizer, thinking=files.defaults.thinking)
    held = tier.pin_prompt(root_key(tier.fingerprint, salt.encode()), prompt, not off)
    tier.close()
    print(f"{held} of {len(prompt)} tokens {'unpinned' if off else 'pinned'}")
    raise typer.Exit(int(held == 0))


@cache.command("explain")
def cache_explain(
    first: Annotated[Path, typer.Argument(metavar="ONE", help="A chat request as JSON, or any text file.")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="Another that should have shared its prefix.")],
    model: Annotated[str, MODEL] = "bundled",
) -> None:
    """Why two requests do not share more of their prefix: the first token that differs, from both sides."""
    from cedar.chat.explain import explain, read_prompt
    from cedar.engine.load import open_model

    files = open_model(model)
    one, other = (read_prompt(path, files.tokenizer, thinking=files.defaults.thinking) for path in (first, second))
    print(explain(one, other, files.tokenizer, names=(str(first), str(second))))


train = typer.Typer(no_args_is_help=True, help="Train a model: prepare data, run a recipe, export.")
evaluate = typer.Typer(help="Measure what a model can do: everything, or one thing.")
app.add_typer(train, name="train")
app.add_typer(evaluate, name="eval")


@train.command("prepare")
def prepare_data(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the data folder goes.")] = Path("runs/data"),
    texts: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]DIR", help="JSON lines (.zst) with `text`, the corpus NAME (stories); repeat."),
    ] = None,
    chats: Annotated[Path | None, typer.Option(metavar="DIR", help="JSON lines (.zst) with `messages`.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the tokenizer: nano 512, micro 1024, mini 2048.")] = 1024,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this tokenizer.json instead of training one.")
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="Ids in the order in which texts are taken, first column."),
    ] = None,
    max_characters: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]N", help="Stop a corpus after so many characters.")
    ] = None,
    chat_source: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]SOURCE", help="Take chats of this source alone, for NAME (instruct); repeat."),
    ] = None,
    max_chat_tokens: Annotated[int, typer.Option(min=16, help="Leave out chats that are longer.")] = 2048,
) -> None:
    """Tokenise text and chats into a data folder; files named validation-* are held out."""
    from cedar.chat.tokenizer import Tokenizer
    from cedar.errors import ConfigError
    from cedar.train.prepare import prepare

    if not texts and chats is None:
        raise ConfigError("nothing to prepare: name a folder with --texts, --chats or both")
    sources: dict[str, list[str]] = {}
    for name, source in _named(chat_source, "instruct"):
        sources.setdefault(name, []).append(source)
    limits = {}
    for name, value in _named(max_characters, "stories"):
        if not value.isdecimal():
            raise ConfigError(f"--max-characters {value!r} is no number, expected N or NAME=N")
        limits[name] = int(value)
    prepare(
        out,
        texts=dict(_named(texts, "stories")),
        chats=chats,
        vocab_size=vocab_size,
        order=dict(_named(order, "stories")),
        max_characters=limits,
        chat_sources=sources or None,
        max_chat_tokens=max_chat_tokens,
        tokenizer=None if tokenizer is None else Tokenizer.load(tokenizer),
    )


def _named(values: list[str] | None, default: str) -> list[tuple[str, str]]:
    """`NAME=VALUE` or `VALUE` -> (name, value)."""
    pairs = [value.partition("=") for value in values or ()]
    return [(name, value) if mark else (default, name) for name, mark, value in pairs]


@train.command("run")
def train_run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe, recipes/micro-cpu.toml for one.")],
    run: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run; the same folder goes on from there.")],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Data folder, instead of the recipe's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Time of the whole run; decides the steps.")] = None,
    stop_after: Annotated[float | None, typer.Option(min=0, help="Minutes after which this command saves.")] = None,
    start_from: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Begin from a model folder or from weight shards.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write the log for TensorBoard too.")] = False,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Change a field, optim.learning_rate=1e-3 for one."),
    ] = None,
) -> None:
    """Train a recipe, or go on with it; Ctrl-C and SIGTERM save first."""
    import json

    from cedar.config.train import load_train_config
    from cedar.train import run as runs

    changes = [*(change or ()), *([f"data.folder={json.dumps(str(data))}"] if data is not None else [])]
    config = load_train_config(recipe, changes)
    runs.train(
        config,
        run,
        device=device,
        minutes=minutes,
        stop_after=stop_after,
        start_from=start_from,
        tensorboard=tensorboard,
    )


@train.command("draft")
def train_draft(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the finished model.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Data folder that prompts come from.")],
    run: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run; the same folder goes on from there.")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Time of training; decides the steps.")] = None,
    stop_after: Annotated[float | None, typer.Option(min=0, help="Minutes after which this command saves.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a field, blocks=1 for one.")
    ] = None,
) -> None:
    """Train a draft for a model from text that the model writes, and write both to RUN/model."""
    from cedar.config.load import override
    from cedar.train import draft

    config = override(draft.DraftTrainConfig(), change or ())
    draft.train_draft(model, data, run, config, device=device, minutes=minutes, stop_after=stop_after)


@train.command("export")
def train_export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")],
) -> None:
    """Write a run's newest checkpoint as a model folder, RUN/model."""
    from cedar.train import run as runs

    runs.export(run)


@evaluate.callback(invoke_without_command=True)
def eval_all(
    context: typer.Context,
    model: Annotated[str, MODEL] = "bundled",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Data folder, for held-out text and chats; runs/data for one.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the report goes.")] = Path("runs/evaluation"),
    quick: Annotated[bool, typer.Option("--quick", help="A minute's worth, to see that all works.")] = False,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of the retrieval documents, 131072 for one; repeat.")
    ] = None,
    card: Annotated[bool, typer.Option("--card", help="Put the numbers into the model's card too.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
) -> None:
    """Without a subcommand: text, known entropies, retrieval by length and depth, indexers, switches, replay.

    Writes evaluation.json and evaluation.html.
    """
    if context.invoked_subcommand is not None:
        return
    from cedar.train import run as runs

    runs.evaluate_all(_model_folder(model), out, data=data, quick=quick, lengths=length or (), device=device, card=card)


@evaluate.command("recall")
def eval_recall(
    model: Annotated[str, MODEL] = "bundled",
    length: Annotated[
        int | None, typer.Option(help="Tokens of a document; twice the trained length otherwise.")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents asked about.")] = 12,
    questions: Annotated[int | None, typer.Option(min=1, help="Questions a document, 8 at most otherwise.")] = None,
    seed: Annotated[int, typer.Option(help="Draws other documents.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Exact answers about records beyond the reach of all windows, and the same with random selection."""
    import json

    from cedar.train import run as runs

    result = runs.evaluate_recall(_model_folder(model), length=length, count=documents, questions=questions, seed=seed)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{result['accuracy']:.1%} of {result['questions']} questions answered exactly, over {result['length']} tokens "
        f"(trained on {result['trained_length']}, window {result['window']}, records at least "
        f"{result['least_distance']} tokens back)\n"
        f"{result['accuracy_random_selection']:.1%} when every index source takes random visible entries"
    )
    for step in result["by_distance"]:
        print(f"  {step['from']:>6}..{step['to'] - 1:<6} {step['accuracy']:6.1%} of {step['questions']}")


@evaluate.command("text")
def eval_text(
    data: Annotated[Path, typer.Option(metavar="DIR", help="A corpus folder, runs/data/stories/validation for one.")],
    model: Annotated[str, MODEL] = "bundled",
    length: Annotated[int, typer.Option(min=2, help="Tokens of one run of text.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens scored at most.")] = 32768,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Bits per byte of a held-out corpus."""
    import json

    from cedar.train import run as runs

    result = runs.evaluate_text(_model_folder(model), data, length=length, max_tokens=max_tokens)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['bits_per_byte']:.3f} bits per byte over {result['bytes']:,} bytes of {result['corpus']}")


def _model_folder(model: str) -> Path:
    """The model's directory; `bundled` is the one inside the package."""
    from cedar.engine.load import open_model

    return open_model(model).path
