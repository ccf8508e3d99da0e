"""A name for a model that two models share only if they compute the same K and V."""

import hashlib
import json
from typing import Any

import torch

# Of a config, what says how it came about or how it runs, not what it computes.
_INCIDENTAL = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def model_identity(model: Any) -> str:
    """Returns "<model type>-<SHA-256>" over the configuration and every weight.

    Never equal for two different weights, however alike their names: a cached prefix of one would be noise
    to the other. Takes about 0.5 s for each 500 MB of weights.
    """
    digest = hashlib.sha256()
    config = {name: value for name, value in model.config.to_dict().items() if name not in _INCIDENTAL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        header = f"\n{name} {tensor.dtype} {tuple(tensor.shape)} "
        digest.update(header.encode())
        # Tied weights appear under two names and are one memory; the name says so, the bytes count once.
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.numpy())
    return f"{model.config.model_type}-{digest.hexdigest()}"
