"""The decode kernels compile for sm_90 on a machine without a GPU (some 20 s, cached by content)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there is nothing to compile")

# every kernel of a decode step
EXPECTED = {
    "_attend", "_join", "_scores", "_select", "_store_normed", "_grouped_linear", "_norm_round", "_route", "_up",
    "_down", "_advance", "_share_streams", "_join_shares", "_stream_rows", "_tile_products", "_mix_rows", "_memory",
    "_gate", "_split_latent", "_pool_pairs", "_look_back", "_plan", "_locate", "_draw_rows", "_packed_linear",
    "_coded_linear", "_router_shares", "_choose_many", "_swiglu_round", "_add_round", "_block_scores", "_widen",
    "_attend_wide",
}  # fmt: skip


def test_decode_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("hopper_compiler.py")
    root = script.parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(script), "mini"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert EXPECTED <= {line.split(":")[0] for line in done.stdout.splitlines()}
