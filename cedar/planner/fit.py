"""Device memory -> pages, tokens and sequences; and how much memory a wish needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.errors import CapacityError, ConfigError
from cedar.planner import kv
from cedar.planner.memory import WeightBytes, step_bytes, weight_bytes

# rows of one forward step that the activations are reserved for
STEP_ROWS = 4096
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_COUNT_UNITS = {"": 1, "k": 2**10, "m": 2**20}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What fits when the weights are held in one form.

    Attributes:
        weights: Bytes of the weights, Engram tables apart.
        engram_tables: Bytes of the tables held in memory; 0 when they stay memory-mapped on disk.
        pages: Pages of 128 tokens in what is left; 0 when the weights alone do not fit.
        missing: Bytes that lack for weights and activations, 0 when they fit.
        sequences: Context in tokens -> sequences of that length at once.
    """

    form: str
    weights: int
    engram_tables: int
    activations: int
    left: int
    pages: int
    missing: int
    sequences: dict[int, int]

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS


def fit(config: ModelConfig, memory_bytes: int, contexts: Iterable[int]) -> tuple[Fit, ...]:
    """What fits into `memory_bytes`, for each form of the weights, Engram tables in memory and mapped.

    Raises:
        CapacityError: No memory, or a context below 1 token.
    """
    if memory_bytes <= 0:
        raise CapacityError(f"{memory_bytes} bytes of memory hold nothing, expected a positive number")
    contexts = tuple(contexts)
    forms = weight_bytes(config)
    mapped = (False, True) if forms[0].engram_tables else (False,)
    return tuple(_fit(config, memory_bytes, contexts, form, leave) for form in forms for leave in mapped)


def _fit(config: ModelConfig, memory_bytes: int, contexts: tuple[int, ...], form: WeightBytes, mapped: bool) -> Fit:
    tables = 0 if mapped else form.engram_tables
    activations = step_bytes(config, rows=STEP_ROWS)
    left = memory_bytes - form.dense - tables - activations
    return Fit(
        form=form.form,
        weights=form.dense,
        engram_tables=tables,
        activations=activations,
        left=max(0, left),
        pages=max(0, left) // kv.page_bytes(config),
        missing=max(0, -left),
        sequences={context: max(0, left) // sequence_bytes(config, context) for context in contexts},
    )


def sequence_bytes(config: ModelConfig, context: int) -> int:
    """Device bytes of one running sequence of `context` tokens.

    Raises:
        CapacityError: A context below 1 token.
    """
    if context < 1:
        raise CapacityError(f"a context of {context} tokens does not exist, expected at least 1")
    return kv.num_pages(context) * kv.page_bytes(config) + kv.resident_bytes(config)


def memory_needed(config: ModelConfig, *, context: int, sequences: int) -> dict[str, int]:
    """The inverse: device bytes for so many sequences of this length, by form, Engram tables in memory."""
    cache = sequences * sequence_bytes(config, context)
    activations = step_bytes(config, rows=STEP_ROWS)
    return {form.form: form.dense + form.engram_tables + activations + cache for form in weight_bytes(config)}


def parse_bytes(text: str) -> int:
    """A number of bytes from `24GiB`, `24 GB`, `24g` or `25769803776`.

    Raises:
        ConfigError: Not a number with a known unit.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"memory is {text!r}, expected bytes or a number with a unit, for example 24GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_tokens(text: str) -> int:
    """A number of tokens from `4096`, `4K` (2**12) or `1M` (2**20).

    Raises:
        ConfigError: Not a positive whole number with a known unit.

    >>> parse_tokens("1M")
    1048576
    """
    match = re.fullmatch(r"\s*(\d+)\s*([km])?\s*", text.lower())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"context is {text!r}, expected a positive number of tokens, for example 4096, 64K or 1M")
    return int(match[1]) * _COUNT_UNITS[match[2] or ""]
