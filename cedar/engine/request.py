"""What goes into the engine and what comes out of it; no tensors, so a client needs no torch."""

from __future__ import annotations

import math
import queue
import uuid
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from cedar.cache.keys import ImageSpan, cache_tokens
from cedar.errors import RequestError

if TYPE_CHECKING:
    from cedar.cache.manager import Lease
    from cedar.engine.sampling import Sampler

DecoderReplay = Literal["bounded", "exact20", "exact", "off"]
Replay = Literal["bounded", "exact", "off"]
Drafting = Literal["on", "off", "auto"]
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Attributes:
        temperature: 0 takes the likeliest token, the lower id if two are equal.
        top_k: Only the k likeliest tokens; 0 means all.
        top_p: The smallest set of likeliest tokens whose probability reaches this.
        min_p: Only tokens at least this likely, relative to the likeliest.
        max_tokens: Tokens to generate at most, the stop token included; None fills the context.
        seed: Makes the choice reproducible; None draws a fresh one.
        presence_penalty: Taken off the logit of every token that the answer already holds.
        frequency_penalty: The same, once for each time it holds it.
        repetition_penalty: Divides the positive logits of tokens that the prompt or the answer holds, and
            multiplies the negative ones; 1 changes nothing.
        logit_bias: (token id, what to add to its logit) pairs.
        stop_token_ids: Any of these ends the answer and is not part of it.
        logprobs: How many likeliest tokens to report beside each chosen one; None reports nothing.

    Raises:
        RequestError: A value is out of range; `param` names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check(
            "temperature", self.temperature, math.isfinite(self.temperature) and 0 <= self.temperature <= 2, "0 to 2"
        )
        _check("top_k", self.top_k, self.top_k >= 0, "0 (all) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "-2 to 2")
        _check(
            "repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 10, "more than 0, at most 10"
        )
        for token_id, bias in self.logit_bias:
            _check(f"logit_bias[{token_id}]", bias, token_id >= 0 and -100 <= bias <= 100, "-100 to 100")
        _check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "1 or more")
        _check("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit number")
        _check("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= 20, "0 to 20")


def _check(param: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise RequestError(f"{param} is {value}, expected {expected}", param=param)


class Constraint(Protocol):
    """What the next token of one answer may be; `cedar.chat.grammar` makes them."""

    def allowed(self) -> bytes | None:
        """A bit for each token id, lowest first in 32-bit words: may it come next? None allows all."""

    def accept(self, token_id: int) -> None:
        """This one came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        constraint: What the answer must look like; it belongs to this request alone.
        decoder_replay: Rows that the decoder half runs during prefill (serving.md 1.2).
        replay: What a cache hit may be: `bounded` may approximate, `exact` may not, `off` starts cold.
        images: Where images stand in the prompt, and which; what a cache knows of their positions.
        salt: Prompts of different salts never share a cached token.
        keep: Whether what this request computes may serve later ones.
        priority: Higher ones start first, and are set aside last when memory is short.
        draft: `on` drafts in every step, `off` in none, `auto` where that has been the faster way; it never decides
            which tokens come, only when.
        timeout_s: The request ends with reason `timeout` if its first token has not come after so long; as that
            time draws near it goes before others of its priority.

    Raises:
        RequestError: A timeout of no time.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    decoder_replay: DecoderReplay = "bounded"
    replay: Replay = "bounded"
    images: tuple[ImageSpan, ...] = ()
    salt: bytes = b""
    keep: bool = True
    priority: int = 0
    draft: Drafting = "auto"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise RequestError(f"timeout_s is {self.timeout_s}, expected more than 0 seconds", param="timeout_s")


def check_room(num_prompt: int, wanted: int | None, context: int) -> int:
    """Tokens that may be generated after a prompt; `wanted` None asks for all there is room for.

    Raises:
        RequestError: The context does not hold the prompt and what was asked for; the message has all three
            numbers.
    """
    room = context - num_prompt
    if room < (wanted or 1):
        raise RequestError(
            f"the context holds {context} tokens; the prompt has {num_prompt} and {wanted or 1} more were requested: "
            + ("shorten the prompt" if room < 1 else f"shorten the prompt or lower max_tokens to {room}"),
            param="messages" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return wanted or room


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` prompt tokens have run."""

    done: int
    total: int


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token; `top` holds (id, log-probability) of the likeliest ones if asked for.

    A struct, since there are many: it takes a tenth of a dataclass's time, and the garbage collector never sees it.
    """

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Rewound:
    """The answer is its first `num_tokens` tokens again; those that came after them are taken back."""

    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The last event of a request.

    Attributes:
        completion_tokens: Tokens generated, a stop token included; of a fork, the inherited ones too.
        drafted_tokens: Tokens that were proposed and verified.
        accepted_tokens: Those among them that became part of the answer.
        draft_steps: Steps that verified any.
        cached_tokens: Tokens of the prompt that a cache held already.
        run_tokens: Rows of the prompt that ran, cached ones that ran again included.
        cache_bytes: What the sequence's cache held at the end.
        error: Why, for the reason `error`.
        resume: How the prompt started (serving.md 2.1).
        cache_tier: Where the cached tokens came from.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    run_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0
    error: str = ""
    resume: Literal["cold", "g0", "g1", "g2", "g3"] = "cold"
    cache_tier: Literal["none", "memory", "host", "disk", "shared"] = "none"

    @property
    def accept_length(self) -> float:
        """Tokens that a step with drafts gave, the model's own included; 1 without any."""
        return 1 + self.accepted_tokens / self.draft_steps if self.draft_steps else 1.0

    @property
    def verify_width(self) -> float:
        """Drafts that a step with drafts verified."""
        return self.drafted_tokens / self.draft_steps if self.draft_steps else 0.0

    @property
    def replayed_tokens(self) -> int:
        """Cached tokens whose rows ran again: windows that nobody kept."""
        return max(0, self.run_tokens - (self.prompt_tokens - self.cached_tokens))


Event = Progress | Token | Rewound | Finished


class Handle:
    """A submitted request: iterate over its events, the last is `Finished`.

    Iteration is for requests submitted without `on_event`.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.cancel = cancel

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self.events.get()
            yield event
            if isinstance(event, Finished):
                return


class Status(Enum):
    """Where a sequence stands; WAITING and PREEMPTED hold no pages."""

    WAITING = "waiting"
    PREEMPTED = "preempted"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while the engine works on it; only the engine's thread changes it after submission.

    Attributes:
        tokens: Prompt and answer so far.
        prompt_keys: The prompt as a cache knows it, images and all.
        said: The answer's tokens as they were sent.
        state: The model's state of this sequence, None before admission and while preempted.
        lease: Its pages, None before admission and without a cache.
        aside: What a preempted sequence goes on from: a snapshot and its pages' bytes.
        num_done: Tokens whose rows have run, those that a cache held included.
        num_run: Rows of the prompt, and of answer tokens that were known already, that ran for this request.
        looked_far: The shared tier was asked for its pages.
        fetch: The answer, None if there is nothing to wait for.
        width: Drafts that its last step verified.
        drafted, accepted, draft_steps: Drafts verified so far, those that stood, steps that verified any.
        alone: A step that it was part of failed, so its next one has no company.
        waits_for: Whose prompt's end it starts from.
        forks: Who starts from its prompt's end.
        cancelled: Set by anyone; the engine's thread ends the sequence at its next step.
    """

    request: Request
    emit: Callable[[Event], None]
    max_tokens: int
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    said: list[Token] = field(default_factory=list)
    status: Status = Status.WAITING
    state: Any = None
    sampler: Sampler | None = None
    lease: Lease | None = None
    aside: tuple[Any, list[bytes]] | None = None
    fetch: Future[None] | None = None
    looked_far: bool = False
    num_done: int = 0
    num_run: int = 0
    reserved_pages: int = 0
    width: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    stepped: int = 0
    alone: bool = False
    waits_for: Sequence | None = None
    forks: list[Sequence] = field(default_factory=list)
    cancelled: bool = False
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    num_prompt: int = field(init=False)
    prompt_keys: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)
        self.prompt_keys = cache_tokens(self.request.prompt_ids, self.request.images)

    def keys(self, stop: int) -> Several[int]:
        """The first `stop` tokens as a cache knows them."""
        if not self.request.images:
            return self.tokens[:stop]
        return (*self.prompt_keys, *self.tokens[self.num_prompt :])[:stop]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Known tokens whose rows have still to run before the next one is chosen."""
        return len(self.tokens) - self.num_done

    @property
    def deadline_s(self) -> float | None:
        """When the first token must have come, None once it has."""
        if self.request.timeout_s is None or self.first_token_s:
            return None
        return self.submitted_s + self.request.timeout_s

    @property
    def phase(self) -> str:
        """The status in the words of the metrics: rows that a cache held run in `replay`, drafts in `verify`."""
        if self.status is Status.PREFILL and self.lease is not None and self.num_done < self.lease.plan.cached_tokens:
            return "replay"
        if self.status is Status.PREFILL and self.num_done >= self.num_prompt:
            return "replay"
        return "verify" if self.status is Status.DECODE and self.width else self.status.value
