"""A model directory: its small files at once, its weights when asked. Only reading the weights needs torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cedar
from cedar.chat.encode import END_OF_ANSWER
from cedar.chat.tokenizer import EOS, Tokenizer
from cedar.config.load import load_config
from cedar.config.model import ModelConfig
from cedar.config.serve import GenerationDefaults, ServeConfig, load_generation_defaults
from cedar.engine.request import SamplingParams
from cedar.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cedar.cache.manager import CacheManager
    from cedar.cache.store import PageStore
    from cedar.engine.engine import Engine
    from cedar.engine.runner import DecodeRunner
    from cedar.model.transformer import Transformer

log = logging.getLogger(__name__)

# goes up when the bytes of a page, or what they depend on, change
FORMAT_VERSION = 1
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


def load_model(files: ModelFiles, *, device: str | None = None, dtype: torch.dtype | None = None) -> Transformer:
    """The model, ready to run: on the GPU in bfloat16 if there is one, else on the CPU in float32.

    Raises:
        FormatError: The checkpoint is not what its config says.
    """
    import torch

    from cedar.checkpoint.read import read_checkpoint

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    return read_checkpoint(files.path, dtype=dtype, device=device)


def fingerprint(files: ModelFiles) -> bytes:
    """What pages of this model are kept under: another config, other weights or another format see none of them.

    It reads the config, the index and the head of each shard, not the weights: a shard that was written anew
    differs in size, in its header or in its time of writing.
    """
    running = hashlib.sha256(f"cedar pages {FORMAT_VERSION}".encode())
    for name in ("config.json", "model.safetensors.index.json"):
        file = files.path / name
        running.update(file.read_bytes() if file.exists() else b"")
    for shard in sorted(files.path.glob("*.safetensors")):
        about = shard.stat()
        running.update(f"{shard.name} {about.st_size} {about.st_mtime_ns}".encode())
        with shard.open("rb") as opened:
            running.update(opened.read(min(int.from_bytes(opened.read(8), "little"), 2**24)))
    return running.digest()


def open_store(files: ModelFiles, config: ServeConfig, *, read_only: bool = False) -> PageStore:
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
        fingerprint=fingerprint(files),
        payload_bytes=page_bytes(files.config),
        budget_bytes=config.cache_disk_bytes,
        read_only=read_only,
    )


def start_engine(files: ModelFiles, config: ServeConfig) -> Engine:
    """Read the weights and start the thread that serves them.

    Raises:
        FormatError: The checkpoint is not what its config says, or `cache_dir` holds another format.
        ConfigError: `cache_bytes` holds less than two pages.
    """
    from cedar.cache.manager import CacheManager
    from cedar.engine.engine import Engine
    from cedar.model.sequence import Snapshot
    from cedar.planner.kv import page_bytes

    num_pages = config.cache_bytes // page_bytes(files.config)
    if num_pages < 2:
        raise ConfigError(f"cache_bytes is {config.cache_bytes}, two pages are {2 * page_bytes(files.config)}")
    model = load_model(files)
    cache = CacheManager(
        files.config,
        num_pages=num_pages,
        dtype=model.dtype,
        device=model.device,
        strict=config.strict_cache,
        snapshot_bytes=config.snapshot_bytes,
        snapshot_ttl_s=config.snapshot_ttl_s,
        fingerprint=fingerprint(files),
        store=None if config.cache_dir is None else open_store(files, config),
        read_snapshot=Snapshot.from_bytes,
    )
    return Engine(
        model,
        runner=_open_runner(model, cache, config),
        max_context=config.max_context,
        prefill_chunk=config.prefill_chunk,
        max_waiting=config.max_waiting,
        max_running=config.max_running,
        cache=cache,
    )


def _open_runner(model: Transformer, cache: CacheManager, config: ServeConfig) -> DecodeRunner | None:
    """Graphs for decoding, made beforehand; None, with the reason in the log, where they cannot be."""
    from cedar.engine import runner

    reason = runner.unavailable(model, cache, exact=config.strict_cache)
    if reason:
        log.info("decoding runs op by op: %s", reason)
        return None
    try:
        graphs = runner.DecodeRunner(
            model, cache, max_rows=config.max_running, max_context=config.context(model.config)
        )
        graphs.warm_up()
    except Exception:  # a driver or a kernel that this machine does not take must not keep the server down
        log.warning("decoding runs op by op: the graphs could not be made", exc_info=True)
        return None
    return graphs
