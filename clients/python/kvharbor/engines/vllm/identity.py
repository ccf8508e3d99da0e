"""A name for weights that two engines share only if they compute the same K and V."""

import hashlib
import json
from typing import Any

import torch

# Of a config, what says how it came about or how it runs, not what it computes.
_INCIDENTAL = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def weights_identity(model: torch.nn.Module, hf_config: Any) -> str:
    """Returns "<model type>-<SHA-256>" over the configuration and every weight as it was loaded.

    Of a tensor-parallel rank this is its shard's: `common_identity` makes one of all. Takes about a second for each
    500 MB of weights; on a device they are copied to the host, one after another.
    """
    digest = hashlib.sha256()
    config = {name: value for name, value in hf_config.to_dict().items() if name not in _INCIDENTAL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    seen: set[int] = set()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda named: named[0]):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        # Tied weights appear under two names and are one memory; the name says so, the bytes count once.
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(flat)
    return f"{hf_config.model_type}-{digest.hexdigest()}"


def common_identity(own: str, shards: list[str]) -> str:
    """Returns the identity of all ranks' shards together, in order of rank; `own` where there is one rank."""
    if len(shards) == 1:
        return own
    kind, _, _ = own.rpartition("-")
    return f"{kind}-{hashlib.sha256(' '.join(shards).encode()).hexdigest()}"
