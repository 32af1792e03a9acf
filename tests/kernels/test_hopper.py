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
    "_add_round",
    "_advance",
    "_advance_route",
    "_advance_split",
    "_advance_wide",
    "_attend",
    "_attend_wide",
    "_block_scores",
    "_down",
    "_down_alone",
    "_down_all",
    "_draw_rows",
    "_gate",
    "_grouped_linear",
    "_join",
    "_locate",
    "_look_back",
    "_memory",
    "_mix_rows",
    "_multiply_tiles",
    "_norm_round",
    "_one_row",
    "_packed_linear",
    "_place",
    "_plan",
    "_pool_pairs",
    "_rank",
    "_route",
    "_route_many",
    "_scores",
    "_select",
    "_split_latent",
    "_store_normed",
    "_stream_rows",
    "_swiglu_round",
    "_tile_products",
    "_up",
    "_up_alone",
    "_widen",
}


def test_decode_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("hopper_compiler.py")
    root = script.parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(script), "mini"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert EXPECTED <= {line.split(":")[0] for line in done.stdout.splitlines()}
