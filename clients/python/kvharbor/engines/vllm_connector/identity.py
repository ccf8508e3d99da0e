"""A name for the checkpoint of an engine. A connector sees no weights, so it is the files that are hashed."""

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from kvharbor.engines.vllm.errors import SettingInvalid

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_COMMIT = re.compile("[0-9a-f]{40}")


def checkpoint_identity(model_config: Any, named: str) -> str:
    """Returns a name that two engines share only if they compute the same K and V.

    `named` if it is given. Else "<model type>-<SHA-256>" over configuration, type, quantization, and the files of a
    local folder or the commit of a repository. Raises SettingInvalid where neither is known. Takes about a second
    for each 500 MB, once a process.
    """
    if named:
        return named
    digest = hashlib.sha256(
        f"{model_config.hf_config.to_json_string()} {model_config.dtype} {model_config.quantization} ".encode()
    )
    folder = Path(model_config.model)
    if folder.exists():
        digest.update(_files_digest(folder.resolve()))
    elif model_config.revision and _COMMIT.fullmatch(model_config.revision):
        digest.update(f"{model_config.model}@{model_config.revision}".encode())
    else:
        raise SettingInvalid(
            "model",
            named,
            f"a name for the weights: {model_config.model} is no local folder, and its revision no commit",
        )
    return f"{model_config.hf_config.model_type}-{digest.hexdigest()}"


@functools.lru_cache(maxsize=4)
def _files_digest(place: Path) -> bytes:
    files = [place] if place.is_file() else sorted(file for kind in _WEIGHTS for file in place.glob(kind))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"\n{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.digest()
