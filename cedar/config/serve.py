"""How a model is served: the server's limits, and what the model's own files say about sampling."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cedar.config.load import nearest
from cedar.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Limits of one server.

    Attributes:
        max_context: Longest prompt plus answer in tokens; None means what the model's config allows.
        max_step_tokens: Rows of a step, of prompts and of answers together; None means 272 on a CPU and 16,384 on a
            GPU, 4,096 there for a model that keeps the checkpoint's bytes. A cancel, and the progress a client sees,
            waits for one step.
        target_tpot_s: Time between two tokens of a stream that 95 in 100 should keep: prompts make way for it. None
            has no target.
        max_waiting: Requests that may queue; more are told to come back later.
        max_body_bytes: Largest request body.
        ping_s: Silence after which a stream gets a comment, so that no client or proxy gives up.
        stall_s: Silence of the engine, while requests are open, after which the log says so.
        shutdown_s: How long open answers may take to end once the server was told to stop.
        drain_s: How long, before that, they may go on while new requests are refused.
        aliases: Other names of the model; `*` takes any name.
        strict: Unknown fields are refused, not only warned about.
        reasoning_alias: Reasoning is sent as `reasoning` too, beside `reasoning_content`: some clients read only that.
        open_to_all: Other machines may ask without a key.
        api_key_file: Keys that may ask (`cedar.server.auth` tells its shape); None lets everybody.
        dropped_lines: Lines of system messages that begin with one of these are left out of the prompt.
        max_running: Sequences that run at once; more wait.
        cache_bytes: Memory for pages: of the sequences that run, and of prefixes that later ones may share.
        snapshot_bytes: Host memory for snapshots, which resume a conversation without computing anything again;
            None takes a tenth of what pages have beside it.
        snapshot_ttl_s: A snapshot that nobody asked for leaves after this long.
        cache_dir: Where pages go to survive a restart; None keeps none. The files hold prompts.
        cache_disk_bytes: What the files there may grow to.
        draft: Whether the model's own draft, if it has one, proposes tokens ahead; a request may still say no.
        strict_cache: A hit never changes an answer: exact resumes alone, and arithmetic that does not depend on
            what runs beside a request. Slower.
        exact_turn_replay: An assistant turn that a client sends back stands in the prompt as the tokens it was
            generated as, however the client spells it.
        replay_turns: Turns remembered for that.
        engram: Where Engram's tables lie: in `memory` (the GPU's, if there is one), in the memory of its `host`,
            `mapped` from the checkpoint, or on `disk` with a bounded number of rows in memory.
        engram_cache_bytes: Those rows.
        cache_day_bytes: What may be written to `cache_dir` in a day; None sets no limit.
        cache_shared: URL of an object store whose pages other machines share; None uses none.
        cache_host_bytes: Host memory for pages that leave a GPU, or that come from `cache_shared`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_context: int | None = None
    max_step_tokens: int | None = None
    target_tpot_s: float | None = None
    max_waiting: int = 256
    max_body_bytes: int = 48 * 2**20
    ping_s: float = 10.0
    stall_s: float = 30.0
    shutdown_s: float = 1.0
    drain_s: float = 0.0
    aliases: tuple[str, ...] = ()
    strict: bool = False
    reasoning_alias: bool = False
    api_key_file: Path | None = None
    open_to_all: bool = False
    dropped_lines: tuple[str, ...] = ("x-anthropic-billing-header:",)
    max_running: int = 16
    cache_bytes: int = 512 * 2**20
    snapshot_bytes: int | None = None
    snapshot_ttl_s: float = 600.0
    cache_dir: Path | None = None
    cache_disk_bytes: int = 8 * 2**30
    draft: bool = True
    strict_cache: bool = False
    exact_turn_replay: bool = True
    replay_turns: int = 65536
    engram: Literal["memory", "host", "mapped", "disk"] = "memory"
    engram_cache_bytes: int = 256 * 2**20
    cache_day_bytes: int | None = None
    cache_shared: str | None = None
    cache_host_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "target_tpot_s"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a positive number")
        for name in ("max_waiting", "max_body_bytes", "ping_s", "stall_s", "shutdown_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a positive number")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s}, expected seconds, 0 or more")
        for name in (
            "max_running",
            "cache_bytes",
            "snapshot_ttl_s",
            "cache_disk_bytes",
            "replay_turns",
            "engram_cache_bytes",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a positive number")
        if self.snapshot_bytes is not None and self.snapshot_bytes < 0:
            raise ConfigError(f"snapshot_bytes is {self.snapshot_bytes}, expected 0 (no snapshots) or more")
        if self.cache_day_bytes is not None and self.cache_day_bytes < 0:
            raise ConfigError(f"cache_day_bytes is {self.cache_day_bytes}, expected 0 (write nothing) or more")
        if self.cache_host_bytes < (1 if self.cache_shared else 0):
            raise ConfigError(
                f"cache_host_bytes is {self.cache_host_bytes}, expected 0 or more, and room for pages of cache_shared"
            )
        if self.engram not in ("memory", "host", "mapped", "disk"):
            raise ConfigError(f"engram is {self.engram!r}, expected memory, host, mapped or disk")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}, expected 0..65535 (0 takes a free one)")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError(f"max_context is {self.max_context}, expected at least 2: one token in, one out")

    @property
    def snapshot_budget(self) -> int:
        """Bytes for snapshots: a tenth of the whole unless they were told.

        Source: serving.md 4.1.
        """
        return self.cache_bytes // 9 if self.snapshot_bytes is None else self.snapshot_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What applies where a request says nothing.

    Attributes:
        max_new_tokens: Longest answer; None takes the API's own default (serving.md 6.2).
        thinking: Whether the model reasons before it answers.
        draft_confidence_temperatures: What divides the draft's confidence logits at each place, for `sampled` and
            for `greedy` answers; found by calibration.
        draft_confidence_offsets: What is then added.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int | None = None
    thinking: bool = True
    draft_confidence_temperatures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    draft_confidence_offsets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def answer_tokens(self, *, thinking: bool, effort: int) -> int:
        """Longest answer of a request that sets none; the context may clip it.

        Source: serving.md 6.2.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if not thinking:
            return 8192
        return 131072 if effort == 100 else 65536


# keys of the published file that say nothing about sampling here
_IGNORED = ("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "transformers_version", "_from_model_config")


def load_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read `generation_config.json`; without one, the defaults of the release.

    Raises:
        ConfigError: Not a JSON object, a key that is unknown, or a value of the wrong type or range.
    """
    file = directory / "generation_config.json"
    if not file.exists():
        return GenerationDefaults()
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}, expected an object")
    known = [field.name for field in dataclasses.fields(GenerationDefaults)]
    kept = {}
    for name, value in values.items():
        if name in known:
            kept[name] = _checked(file, name, value)
        elif name not in _IGNORED:
            raise ConfigError(f"{file}: unknown key {name!r}{nearest(name, known)}")
    return GenerationDefaults(**kept)


def _checked(file: Path, name: str, value: Any) -> Any:
    if name == "thinking":
        valid = isinstance(value, bool)
    elif name.startswith("draft_confidence_"):
        lowest = 0.0 if name == "draft_confidence_temperatures" else -math.inf
        valid = isinstance(value, dict) and all(
            isinstance(numbers, list) and all(isinstance(n, (int, float)) and lowest < n < math.inf for n in numbers)
            for numbers in value.values()
        )
        value = {kind: tuple(numbers) for kind, numbers in value.items()} if valid else value
    elif name in ("top_k", "max_new_tokens"):
        valid = (
            isinstance(value, int) and not isinstance(value, bool) and value >= (1 if name == "max_new_tokens" else 0)
        )
    else:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        valid = is_number and math.isfinite(value) and 0 <= value <= (2 if name == "temperature" else 1)
        valid = valid and not (name == "top_p" and value == 0)
    if not valid:
        raise ConfigError(f"{file}: {name} is {value!r}; see cedar.config.serve.GenerationDefaults for what it may be")
    return value
