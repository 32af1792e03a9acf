"""Commands for whoever runs a server: `cedar doctor`, `cedar key`, `cedar bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure.")


def doctor(
    model: Annotated[str, typer.Option(help="Model directory to look at; the bundled one by default.")] = "bundled",
) -> None:
    """What this machine can do, what is missing, and how to get it; status 1 if cedar cannot serve."""
    from cedar.cli.doctor import examine

    findings = examine(model)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<7} {finding.what:<{width}}  {finding.found}")
        if finding.remedy:
            print(f"{'':<7} {'':<{width}}  -> {finding.remedy}")
    raise typer.Exit(1 if any(finding.state == "missing" for finding in findings) else 0)


def key(name: Annotated[str, typer.Argument(help="Whose key it is; stands in logs.")]) -> None:
    """Make an API key: the table for the key file on standard output, the key itself, once, on standard error."""
    import re
    import sys

    from cedar.errors import ConfigError
    from cedar.server.auth import new_key

    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ConfigError(f"the name {name!r} may have letters, digits, '.', '_' and '-'")
    secret, table = new_key(name)
    print(table, end="")
    print(f"the key of {name}, shown only now: {secret}", file=sys.stderr)


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="A server with OpenAI's API: cedar's, or any other.")],
    model: Annotated[str | None, typer.Option(help="Its name for the model; the first it lists otherwise.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: this many at once.")] = 4,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop instead: requests a second.")] = None,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of each prompt; all differ.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer, at most.")] = 64,
    api_key: Annotated[str, typer.Option(envvar="CEDAR_API_KEY", help="Sent as a bearer token.")] = "none",
    seed: Annotated[int, typer.Option(help="Draws other prompts and arrival times.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw both distributions.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time to first token and time a token of a running server, with percentiles."""
    import asyncio
    import json

    from cedar.cli import load_test

    plan = load_test.Plan(
        url=url.rstrip("/"),
        model=model,
        num_requests=requests,
        concurrency=concurrency,
        rate=rate,
        prompt_words=prompt_words,
        max_tokens=max_tokens,
        api_key=api_key,
        seed=seed,
    )
    report = asyncio.run(load_test.measure(plan))
    if plot is not None:
        load_test.draw(report, plot)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_text())
    if plot is not None and not as_json:
        print(f"figures: {plot}")


@bench.command("draft")
def bench_draft(
    model: Annotated[str, typer.Option(help="Model directory with a draft; the bundled one by default.")] = "bundled",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; repeat for more. 1 and 16.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of all modes; four times as many at batch 1.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of the timed answers.")] = 0.0,
    identity: Annotated[int, typer.Option(min=1, help="Answers compared in deterministic mode.")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Speed and acceptance with the model's own draft, against the same answers without it."""
    import json
    import sys
    from functools import partial

    from cedar.cli import draft_test
    from cedar.engine.load import open_model

    plan = draft_test.Plan(
        batches=tuple(batch or (1, 16)),
        rounds=rounds,
        max_tokens=max_tokens,
        temperature=temperature,
        identity_prompts=identity,
    )
    values = draft_test.measure(open_model(model), plan, report=partial(print, file=sys.stderr, flush=True))
    print(json.dumps(values, indent=2) if as_json else draft_test.as_text(values))
