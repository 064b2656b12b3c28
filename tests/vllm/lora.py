"""A LoRA adapter in the form of Hugging Face PEFT, and the model that it makes when it is merged into its base."""

import json
import shutil
import struct

import numpy as np

ALPHA = 16


def read_safetensors(path):
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        table, data = json.loads(file.read(size)), file.read()
    return {
        name: np.frombuffer(data[slice(*row["data_offsets"])], dtype="<f4").reshape(row["shape"])
        for name, row in table.items()
        if name != "__metadata__"
    }


def write_safetensors(path, tensors):
    table, end = {}, 0
    for name, data in tensors.items():
        table[name] = {"dtype": "F32", "shape": data.shape, "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in tensors.values():
            file.write(np.ascontiguousarray(data).tobytes())


def write_adapter(base, folder, merged, *, rank=4, strength=0.05, seed=5):
    """An adapter of the queries and values of all layers of the model in `base`; `merged` becomes that model with it.

    Its product has about `strength` times the norm of what it is added to, so that answers are others.
    """
    rng = np.random.default_rng(seed)
    weights = read_safetensors(base / "model.safetensors")
    parts, whole = {}, dict(weights)
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            low = rng.standard_normal((rank, weight.shape[1])).astype("<f4")
            high = rng.standard_normal((weight.shape[0], rank)).astype("<f4")
            high *= np.float32(strength * np.linalg.norm(weight) / (np.linalg.norm(high @ low) * ALPHA / rank))
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            parts[f"{stem}.lora_A.weight"], parts[f"{stem}.lora_B.weight"] = low, high
            whole[name] = weight + np.float32(ALPHA / rank) * (high @ low)
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", parts)
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "bias": "none", "r": rank,
        "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about))
    shutil.copytree(base, merged)
    write_safetensors(merged / "model.safetensors", whole)
