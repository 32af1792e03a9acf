"""Checkpoints to break: golden ones taken apart into plain bytes and put together again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

VECTORS = Path(__file__).parent.parent / "vectors"


@dataclass
class RawTensor:
    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class RawCheckpoint:
    """Tensors as plain bytes; written by this code, not by the package's writer."""

    config: str
    tensors: dict[str, RawTensor] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> RawCheckpoint:
        raw = cls((directory / "config.json").read_text())
        for file in sorted(directory.glob("*.safetensors")):
            data = file.read_bytes()
            begin = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:begin]).items():
                if name != "__metadata__":
                    start, stop = entry["data_offsets"]
                    raw.tensors[name] = RawTensor(entry["dtype"], entry["shape"], data[begin + start : begin + stop])
        return raw

    def save(self, directory: Path, *, shards: int = 2) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(self.config)
        names = list(self.tensors)
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            header, payload = {}, b""
            for name in names[shard::shards]:
                tensor = self.tensors[name]
                start, payload = len(payload), payload + tensor.data
                header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, len(payload)]}
                weight_map[name] = file
            text = json.dumps(header).encode()
            (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + payload)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory
