"""A model directory: its small files at once, its weights when asked. Only reading the weights needs torch."""

from __future__ import annotations

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

    from cedar.engine.engine import Engine
    from cedar.model.transformer import Transformer

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


def start_engine(files: ModelFiles, config: ServeConfig) -> Engine:
    """Read the weights and start the thread that serves them.

    Raises:
        FormatError: The checkpoint is not what its config says.
    """
    from cedar.engine.engine import Engine

    return Engine(
        load_model(files),
        max_context=config.max_context,
        prefill_chunk=config.prefill_chunk,
        max_waiting=config.max_waiting,
    )
