"""A model directory: its small files at once, its weights when asked. Only reading the weights needs torch."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import cedar
from cedar.chat.encode import END_OF_ANSWER
from cedar.chat.tokenizer import EOS, Tokenizer
from cedar.checkpoint.digest import weights_digest
from cedar.config.load import load_config
from cedar.config.model import PAGE_TOKENS, ModelConfig
from cedar.config.serve import GenerationDefaults, ServeConfig, load_generation_defaults
from cedar.engine.request import SamplingParams
from cedar.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cedar.cache.manager import CacheManager
    from cedar.cache.store import PageStore
    from cedar.engine.engine import Engine
    from cedar.engine.runner import DecodeRunner
    from cedar.model.draft import Draft
    from cedar.model.transformer import Transformer

log = logging.getLogger(__name__)

# goes up when the bytes of a page, or what they depend on, change
FORMAT_VERSION = 2
# device and dtype that `load_model` picks, the first where there is no GPU
NUMERICS = ("cpu-float32", "cuda-bfloat16")
# checkpoint bytes from which a GPU reads them as they are: a smaller model waits for launches, not for weights
PACKED_BYTES = 2**30
BUNDLED = "bundled"
BUNDLED_NAME = "cedar"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """What is known of a model before its weights are read.

    Attributes:
        name: What clients call it.
    """

    path: Path
    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    defaults: GenerationDefaults

    def sampling(
        self,
        *,
        context: int,
        num_prompt: int,
        chat: bool,
        thinking: bool = False,
        effort: int = 0,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Sequence[tuple[int, float]] = (),
        max_tokens: int | None = None,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        logprobs: int | None = None,
    ) -> SamplingParams:
        """The request's values, the model's own defaults where it has none.

        A default answer length is clipped to what the context leaves; one that was asked for is not, so that
        the engine can refuse it.

        Args:
            chat: An answer ends at any turn mark, a raw continuation at the end of text alone.
            stop_token_ids: Further tokens that end it.

        Raises:
            RequestError: A value is out of range.
        """
        defaults = self.defaults
        if max_tokens is None and chat:
            longest = defaults.answer_tokens(thinking=thinking, effort=effort)
            max_tokens = max(1, min(longest, context - num_prompt))
        return SamplingParams(
            temperature=defaults.temperature if temperature is None else temperature,
            top_k=defaults.top_k if top_k is None else top_k,
            top_p=defaults.top_p if top_p is None else top_p,
            min_p=defaults.min_p if min_p is None else min_p,
            presence_penalty=presence_penalty or 0.0,
            frequency_penalty=frequency_penalty or 0.0,
            repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
            logit_bias=tuple(logit_bias),
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=(
                *(self.tokenizer.special[name] for name in (END_OF_ANSWER if chat else (EOS,))),
                *stop_token_ids,
            ),
            logprobs=logprobs,
        )


def open_model(path: str | Path = BUNDLED, *, name: str | None = None) -> ModelFiles:
    """Read the config, the tokenizer and the sampling defaults of a model directory, and check that they fit.

    Args:
        path: A directory in the release's format, or `bundled` for the model that comes with cedar.
        name: What clients call it; the directory's name by default.

    Raises:
        ConfigError: No such directory, or a config that breaks a rule.
        FormatError: The tokenizer is missing, broken or another model's.
    """
    directory = Path(cedar.__file__).parent / "bundled" if str(path) == BUNDLED else Path(path)
    if not (directory / "config.json").exists():
        hint = "pass --model DIR" if str(path) == BUNDLED else "expected a directory with config.json and weights"
        raise ConfigError(f"there is no model in {directory}; {hint}")
    config = load_config(directory)
    tokenizer = Tokenizer.load(directory)
    tokenizer.check(config)
    own_name = BUNDLED_NAME if str(path) == BUNDLED else directory.resolve().name
    return ModelFiles(
        path=directory,
        name=name or own_name,
        config=config,
        tokenizer=tokenizer,
        defaults=load_generation_defaults(directory),
    )


def load_model(
    files: ModelFiles,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    engram: Literal["memory", "host", "mapped", "disk"] = "memory",
    engram_cache_bytes: int = 256 * 2**20,
    packed: bool | None = None,
) -> Transformer:
    """The model, ready to run: on the GPU in bfloat16 if there is one, else on the CPU in float32.

    Args:
        engram: Where Engram's tables lie, see `cedar.checkpoint.read.read_checkpoint`.
        packed: FP8 and MXFP4 weights stay as they are stored; by default those of a large model on a GPU do
            (`PACKED_BYTES`), and in no other case.

    Raises:
        FormatError: The checkpoint is not what its config says.
    """
    import torch

    from cedar.checkpoint.read import read_checkpoint
    from cedar.planner.memory import weight_bytes

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    if packed is None:
        stored, *_ = weight_bytes(files.config)
        packed = torch.device(device).type == "cuda" and stored.dense >= PACKED_BYTES
    return read_checkpoint(
        files.path,
        dtype=dtype,
        device=device,
        engram=engram,
        engram_cache_bytes=engram_cache_bytes,
        packed=packed,
    )


def fingerprint(files: ModelFiles, numerics: str) -> bytes:
    """What pages of this model are kept under: another config, other weights or another format see none of them.

    It follows from the config's values, the tokenizer (Engram's addresses depend on it) and every byte of the
    weights, wherever they lie and whatever they are called.

    Args:
        numerics: One of `NUMERICS`: what computed the bytes. They differ in the last bit from one to the other.
    """
    running = hashlib.sha256(f"cedar pages {FORMAT_VERSION} {numerics} {files.config!r}".encode())
    running.update(files.tokenizer.fingerprint.encode())
    running.update(weights_digest(files.path))
    return running.digest()


def open_store(
    files: ModelFiles, config: ServeConfig, *, numerics: str = NUMERICS[0], read_only: bool = False
) -> PageStore:
    """The disk tier of a model; needs no torch.

    Raises:
        ConfigError: No `cache_dir`.
        FormatError: The directory holds another format, or nothing where it must be read.
    """
    from cedar.cache.store import PageStore
    from cedar.planner.kv import page_bytes

    if config.cache_dir is None:
        raise ConfigError("there is no disk tier: give a cache directory")
    return PageStore(
        config.cache_dir,
        fingerprint=fingerprint(files, numerics),
        payload_bytes=page_bytes(files.config),
        budget_bytes=config.cache_disk_bytes,
        day_bytes=config.cache_day_bytes,
        read_only=read_only,
    )


def context_tokens(files: ModelFiles, config: ServeConfig) -> int:
    """Longest prompt plus answer that such a server takes: what the model, its pages and the setting all allow.

    Raises:
        ConfigError: `cache_bytes` holds fewer than two pages, or fewer tokens than `max_context` asks for.
    """
    from cedar.planner.kv import page_bytes

    num_pages = config.cache_bytes // page_bytes(files.config)
    if num_pages < 2:
        raise ConfigError(f"cache_bytes is {config.cache_bytes}, two pages are {2 * page_bytes(files.config)}")
    # a sequence must fit alone, beside a shared copy of its last page
    held = (num_pages - 1) * PAGE_TOKENS
    limit = files.config.max_position_embeddings
    wanted = limit if config.max_context is None else min(config.max_context, limit)
    if config.max_context is not None and wanted > held:
        need = (-(-wanted // PAGE_TOKENS) + 1) * page_bytes(files.config)
        raise ConfigError(
            f"a context of {wanted:,} tokens needs {need:,} bytes of pages, cache_bytes is {config.cache_bytes:,}, "
            f"enough for {held:,} tokens: raise --cache-memory or lower --context"
        )
    return min(wanted, held)


def usual_step_tokens(model: Transformer) -> int:
    """Rows of a step if nobody says otherwise: a stream waits no longer than such a step takes.

    A tenth of a second of a CPU for a small model. Of a GPU the host needs some 50 ms for one, however many rows.
    """
    if model.device.type == "cpu":
        return 272
    return 4096 if model.packed else 16384


def start_engine(files: ModelFiles, config: ServeConfig) -> Engine:
    """Read the weights and start the thread that serves them.

    Raises:
        FormatError: The checkpoint is not what its config says, or `cache_dir` holds another format.
        ConfigError: As `context_tokens`, or `max_step_tokens` does not hold a row of each of `max_running`.
    """
    from cedar.cache.manager import CacheManager
    from cedar.cache.shared import SharedStore
    from cedar.cache.turns import ReplayMap
    from cedar.checkpoint.read import read_draft
    from cedar.engine.engine import Engine
    from cedar.engine.scheduler import SchedulerConfig
    from cedar.engine.speculate import ModelDrafter
    from cedar.model.sequence import Snapshot
    from cedar.planner.kv import page_bytes

    context = context_tokens(files, config)
    num_pages = config.cache_bytes // page_bytes(files.config)
    # exact mode computes rows in blocks, which the kernels of stored bytes do not
    packed = False if config.strict_cache else None
    model = load_model(files, engram=config.engram, engram_cache_bytes=config.engram_cache_bytes, packed=packed)
    numerics = f"{model.device.type}-{str(model.dtype).removeprefix('torch.')}"
    mark = fingerprint(files, numerics)
    store = None if config.cache_dir is None else open_store(files, config, numerics=numerics)
    shared = None
    if config.cache_shared is not None:
        shared = SharedStore(
            config.cache_shared,
            fingerprint=mark,
            payload_bytes=page_bytes(files.config),
        )
    turns = None
    if config.exact_turn_replay:
        turns = ReplayMap(files.tokenizer, mark, max_turns=config.replay_turns, store=store)
    cache = CacheManager(
        files.config,
        num_pages=num_pages,
        dtype=model.dtype,
        device=model.device,
        strict=config.strict_cache,
        snapshot_bytes=config.snapshot_budget,
        snapshot_ttl_s=config.snapshot_ttl_s,
        fingerprint=mark,
        host_bytes=config.cache_host_bytes if shared is not None or model.device.type != "cpu" else 0,
        store=store,
        shared=shared,
        read_snapshot=Snapshot.from_bytes,
        turns=turns,
    )
    draft = read_draft(files.path, model) if config.draft else None
    if draft is not None:
        draft.attach()
    step_tokens = config.max_step_tokens or usual_step_tokens(model)
    if model.device.type == "cuda" and not config.strict_cache:
        _warm_up_prompts(model, min(step_tokens, context - 1))
    runner = _open_runner(model, cache, config, context, draft)
    if runner is None and draft is not None:
        runner = _open_runner(model, cache, config, context, None)
        if runner is not None:
            # a graph's step without drafts is shorter than a drafted one run op by op
            log.warning("drafts are off: their graphs could not be made")
            draft = None
    return Engine(
        model,
        runner=runner,
        drafter=None if draft is None else ModelDrafter(draft, files.defaults, runner),
        max_context=context,
        max_waiting=config.max_waiting,
        scheduling=SchedulerConfig(
            max_running=config.max_running,
            max_step_tokens=step_tokens,
            target_tpot_s=config.target_tpot_s,
        ),
        cache=cache,
    )


def _warm_up_prompts(model: Transformer, most: int) -> None:
    """Throwaway prompts, so that the first request does not wait until kernels are compiled."""
    import torch

    # a chunk in one's and in no number's multiples, and a whole one: what Triton compiles depends on it
    lengths = sorted({1, min(2 * model.config.attention.sliding_window + 3, most), most})
    for place, length in enumerate(lengths):
        began = time.monotonic()
        try:
            state = model.new_state()
            ids_T = torch.zeros(length, dtype=torch.int64, device=model.device)
            model.prefill(state, ids_T, last_only=True)
            model.decode(state, ids_T[:1])
            torch.cuda.synchronize(model.device)
        except Exception:  # a request that meets the same fails alone, and says why
            log.warning("a prompt of %d tokens could not be run beforehand", length, exc_info=True)
            return
        seconds = time.monotonic() - began
        log.info("prompt %d of %d: %d tokens, %.1f s on %s", place + 1, len(lengths), length, seconds, model.device)


def _open_runner(
    model: Transformer, cache: CacheManager, config: ServeConfig, context: int, draft: Draft | None
) -> DecodeRunner | None:
    """Graphs for decoding, made beforehand; None, with the reason in the log, where they cannot be."""
    from cedar.engine.runner import DecodeRunner, unavailable

    reason = unavailable(model, cache, exact=config.strict_cache)
    if reason:
        # on a CPU nobody expects graphs
        log.log(logging.INFO if model.device.type == "cuda" else logging.DEBUG, "decoding runs op by op: %s", reason)
        return None
    try:
        graphs = DecodeRunner(model, cache, max_rows=config.max_running, max_context=context, draft=draft)
        graphs.warm_up()
    except Exception:  # a driver or a kernel that this machine does not take must not keep the server down
        log.warning("decoding runs op by op: the graphs could not be made", exc_info=True)
        return None
    return graphs
