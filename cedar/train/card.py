"""The card of a trained model: every number of it comes from `training.json`, so it cannot go stale."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any


def model_card(facts: Mapping[str, Any], *, parameters: int, size_bytes: int) -> str:
    """README.md of a model folder.

    Args:
        facts: `training.json`.
        parameters: Of the model, Engram tables included.
        size_bytes: Of its weights on disk.
    """
    recipe = facts["recipe"]
    sections = [
        f"# {recipe['preset']}: a small model of the DeepSeek-V4.1-Flash architecture",
        _fill(
            f"{parameters / 1e6:.1f} million parameters, {size_bytes / 1e6:.1f} MB in the release's own format (FP8",
            "and MXFP4 weights, FP8 Engram tables). Trained from random weights by cedar, with every text mechanism of",
            "the architecture on: sliding windows, CSA2 with FP4 entries and FP4 index keys, the candidate pool,",
            "single-pass mHC, Engram, mixture of experts, and bounded decoder replay.",
        ),
        _recall(facts),
        _evaluation(facts),
        _draft(facts),
        _abilities(facts),
        _training(facts),
        _data(facts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _fill(*sentences: str) -> str:
    """A paragraph in lines of the repository's width."""
    return textwrap.fill(" ".join(filter(None, sentences)), width=116, break_on_hyphens=False, break_long_words=False)


def _recall(facts: Mapping[str, Any]) -> str:
    recall = facts.get("recall")
    if recall is None:
        return ""
    times = recall["length"] / facts["trained_length"]
    asked = _fill(
        f"`cedar eval recall` asks for records in texts of {recall['length']} tokens, {times:g} times the longest",
        f"sample of the training ({facts['trained_length']}). Each record lies at least {recall['least_distance']}",
        f"tokens back; the windows of all layers together reach {recall['reach_of_windows']}. An answer counts only if",
        "every digit is the likeliest token. The names asked for are pairs of words that training never joined.",
    )
    rows = "\n".join(
        f"| {step['from']} to {step['to'] - 1} | {step['questions']} | {step['accuracy']:.1%} |"
        for step in recall["by_distance"]
    )
    return f"""## Recall

{asked}

| | exact answers |
|---|---|
| as it serves | **{recall["accuracy"]:.1%}** of {recall["questions"]} |
| every index source (Reindex too) takes random visible entries | {recall["accuracy_random_selection"]:.1%} |

| distance in tokens | questions | exact |
|---|---|---|
{rows}"""


def _evaluation(facts: Mapping[str, Any]) -> str:
    """What `cedar eval` found: the numbers asked for, and retrieval by length."""
    found = facts.get("evaluation")
    if found is None:
        return ""
    asked = "\n".join(f"| {name} | {value} | {bound} | {met} |" for name, value, bound, met in found["gates"])
    kinds = list(found["by_length"])
    lengths = sorted({int(length) for values in found["by_length"].values() for length in values})
    rows = "\n".join(
        f"| {length:,} | " + " | ".join(found["by_length"][kind].get(str(length), "") for kind in kinds) + " |"
        for length in lengths
    )
    told = _fill(
        f"`cedar eval` on {found['device']}. Exact answers, of so many questions; keys, names and filler were made for",
        "the evaluation. Where a number is missed, the table says by how much.",
    )
    return f"""## Evaluation

{told}

| | measured | asked for | met |
|---|---|---|---|
{asked}

| tokens | {" | ".join(kinds)} |
|---|{"---|" * len(kinds)}
{rows}"""


def _draft(facts: Mapping[str, Any]) -> str:
    """The draft beside the model: what it is, and what it was measured to do on held-out text."""
    draft = facts.get("draft")
    if draft is None:
        return ""
    run, measured = draft["run"], draft["measured"]
    kinds = [(kind, values) for kind, values in measured["acceptance"].items() if values]
    rows = "\n".join(
        f"| {kind} | {values.get('greedy', '')} | {values.get('temperature_1', '')} |" for kind, values in kinds
    )
    errors = ", ".join(
        f"{measured[kind]['calibration_error']['all']:.1%} ({kind}, {measured[kind]['sequences']} texts)"
        for kind in ("sampled", "greedy")
    )
    written = sum(draft["text_tokens"].values())
    told = _fill(
        f"{run['blocks']} DSpark blocks of {run['block_size']} tokens,",
        f"{draft['parameters'] / 1e6:.1f} million parameters, trained in {draft['minutes']:g} minutes on",
        f"{written:,} tokens that the model wrote itself, with the model frozen. Tokens a step when all drafts",
        "are verified, the model's own token included, on held-out text:",
    )
    return f"""## Draft

{told}

| text | greedy | at temperature 1 |
|---|---|---|
{rows}

{_fill("Calibration error of surviving up to a place, over all places:", errors + ".")}"""


def _abilities(facts: Mapping[str, Any]) -> str:
    text = facts.get("text")
    sources = {name for stage in facts["recipe"]["stages"] for name in stage["mixture"]}
    measured = ""
    if text is not None:
        measured = (
            f"Held-out stories cost {text['bits_per_byte']:.2f} bits per byte ({text['nats_per_token']:.2f} nats per "
            f"token, runs of {text['length']} tokens)."
        )
    can = _fill(
        'It looks up what a text says ("What is the code for the red fox?") far beyond its window, goes on with a',
        "simple story, and answers a few fixed kinds of question.",
        "It calls a few simple tools in the words it was trained on." if "tools" in sources else "",
        measured,
    )
    cannot = _fill(
        "It knows next to nothing, cannot reason, and does not follow free instructions. Ask for records in the words",
        'it was trained on ("The code for the red fox is 4821."); other wordings work less well or not at all. Its',
        "language and outlook are those of books of 1850 to 1925. Recall was measured up to the length above; beyond",
        "it, nothing is promised.",
        "It was never shown a thought: leave thinking off. Of tools it knows seven."
        if "tools" in sources
        else "It was never shown a thought or a tool call: leave thinking off.",
        "It exists to show the system at work, not to inform anyone.",
    )
    return f"## What it can do, and what not\n\n{can}\n\n{cannot}"


def _training(facts: Mapping[str, Any]) -> str:
    runs = [*facts.get("earlier", ()), facts]
    loss = facts.get("final_loss")
    told = _fill(
        *(_run(run, number) for number, run in enumerate(runs)),
        f"Samples of {facts['shortest_length']} to {facts['trained_length']} tokens in the end. Muon, the Sinkhorn",
        "update and AdamW; the indexers learn from their own loss."
        + (f" Mean loss of the last logged steps: {loss:.3f} nats a learnt token." if loss else ""),
        "Every recipe is in `training.json`.",
    )
    stages = "\n".join(
        f"| {stage['name']} | {stage['share'] * run['steps']:,.0f} | {stage['dense_share']:.0%} | "
        f"{', '.join(stage['rounding']) or 'none'} | {stage['replay_share']:.0%} | "
        f"{', '.join(f'{name} {weight:g}' for name, weight in stage['mixture'].items())} |"
        for run in runs
        for stage in run["recipe"]["stages"]
    )
    return f"""## Training

{told}

| stage | steps | batches that see every entry | roundings | samples under replay | mixture, by tokens |
|---|---|---|---|---|---|
{stages}"""


def _run(run: Mapping[str, Any], number: int) -> str:
    """A sentence on one run; a later one began from the weights of the one before it."""
    recipe = run["recipe"]
    return (
        f"{'Then, from these weights, ' if number else ''}{run['steps']:,} steps of {recipe['rows']} rows of "
        f"{recipe['row_tokens']} tokens, {run['tokens'] / 1e6:.0f} million tokens, seed {recipe['seed']}, "
        f"{run['minutes']:g} minutes on {run['device']}, peak rate {recipe['optim']['learning_rate']:g}."
    )


def _data(facts: Mapping[str, Any]) -> str:
    recipes = [run["recipe"] for run in (*facts.get("earlier", ()), facts)]
    sources = sorted({name for recipe in recipes for stage in recipe["stages"] for name in stage["mixture"]})
    known = {
        "stories": "`stories`: public-domain books in English, the simplest first, from Project Gutenberg and like "
        "collections",
        "docs": "`docs`: documentation of programming languages and tools under permissive licences",
        "instruct": "`instruct`: short question templates and story tasks made for this project (the story tasks "
        "quote the same books), school sums of GSM8K, hand-written tasks of self-instruct",
        "tools": "`tools`: short chats with tool calls made for this project",
        "lookup": "`lookup`: texts with records in them and questions about the records, generated",
        "restate": "`restate`: records told and told again, generated",
        "pairs": "`pairs`: random key-value pairs, generated",
        "copy": "`copy`: repeated spans of random tokens, generated",
        "needles": "`needles`: several records asked for at once, generated",
        "passkey": "`passkey`: one key in a long text, generated",
        "ngram": "`ngram`: a random language of known entropy, generated",
        "mqar": "`mqar`: many queries of random key-value pairs, each behind a mark, generated",
        "mqar_bare": "`mqar_bare`: the same without the marks, generated",
        "arithmetic": "`arithmetic`: sums modulo a small number with their steps, generated",
        "code": "`code`: small classes from a template, generated",
    }
    lines = "\n".join(f"- {known.get(name, f'`{name}`: a corpus of the user')}." for name in sources)
    return f"""## Data and licence

{lines}

`NOTICE` beside this file has the attributions. The weights are free to use like the rest of cedar (MIT)."""
