"""What a server takes of a model, before its weights are read (under a second)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cedar.config.model import PAGE_TOKENS
from cedar.config.serve import ServeConfig
from cedar.engine.load import NUMERICS, context_tokens, open_model, start_engine
from cedar.engine.request import Finished, Request, SamplingParams
from cedar.errors import ConfigError
from cedar.planner.kv import page_bytes
from tests.device import PRETENDED


def test_the_context_is_what_model_pages_and_setting_allow(model_dir: Path) -> None:
    files = open_model(model_dir)
    limit, size = files.config.max_position_embeddings, page_bytes(files.config)
    assert context_tokens(files, ServeConfig()) == limit == 4096
    assert context_tokens(files, ServeConfig(max_context=512)) == 512
    assert context_tokens(files, ServeConfig(max_context=10 * limit)) == limit
    # one page is kept for the copy of a shared last page
    assert context_tokens(files, ServeConfig(cache_bytes=10 * size)) == 9 * PAGE_TOKENS
    assert context_tokens(files, ServeConfig(cache_bytes=10 * size, max_context=9 * PAGE_TOKENS)) == 9 * PAGE_TOKENS


@pytest.mark.device
def test_a_server_takes_the_gpu_without_being_told(model_dir: Path) -> None:
    has_one = torch.cuda.is_available()
    engine = start_engine(open_model(model_dir), ServeConfig(max_context=512, max_running=2))
    try:
        assert engine.numerics == NUMERICS[has_one]
        assert (engine._runner is not None) == has_one
        events = list(engine.submit(Request(prompt_ids=(3, 4, 5), sampling=SamplingParams(max_tokens=5))))
        assert isinstance(events[-1], Finished) and not events[-1].error and len(events) > 2
    finally:
        engine.close()
    # what was compiled is there for the next start
    assert not has_one or PRETENDED or any(Path(os.environ["TRITON_CACHE_DIR"]).iterdir())


@pytest.mark.skipif(shutil.which("g++") is None, reason="a pretended device takes a C++ compiler")
def test_tensors_stay_on_a_device_that_is_not_the_cpu() -> None:
    """Two answers, prompts and slots, in a process whose GPU is pretended."""
    script = (
        "from tests import pretend_gpu; pretend_gpu.install();"
        "from tests.engine.test_runner import answers, make_engine, random_model, requests, tiny;"
        "engine = make_engine(random_model(tiny(), 11), slots=2, exact=False);"
        "print(*(end.reason for _, end in answers(engine, requests(2, 2))), engine._runner is not None)"
    )
    environment = {**os.environ, "CEDAR_TEST_DEVICE": "pretend", "CEDAR_KERNELS": "reference", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["length", "length", "True"], done.stdout + done.stderr[-3000:]


def test_a_context_that_the_pages_do_not_hold_is_refused(model_dir: Path) -> None:
    files = open_model(model_dir)
    size = page_bytes(files.config)
    with pytest.raises(ConfigError, match="a context of 1,153 tokens needs .* enough for 1,152 tokens") as caught:
        context_tokens(files, ServeConfig(cache_bytes=10 * size, max_context=9 * PAGE_TOKENS + 1))
    # what it says is needed is enough
    need = int(str(caught.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert context_tokens(files, ServeConfig(cache_bytes=need, max_context=9 * PAGE_TOKENS + 1)) == 9 * PAGE_TOKENS + 1
    with pytest.raises(ConfigError, match="two pages are"):
        context_tokens(files, ServeConfig(cache_bytes=2 * size - 1))
