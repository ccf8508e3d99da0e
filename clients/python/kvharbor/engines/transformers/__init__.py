"""Runs decoder models of Hugging Face transformers on a kvharbor pool, K and V left where they lie."""

from kvharbor.engines.transformers.batch import Admission
from kvharbor.engines.transformers.errors import (
    AttentionUnsupported,
    CacheForeign,
    ModelMissing,
    RequestInvalid,
    TransformersEngineError,
)
from kvharbor.engines.transformers.forward import PoolModel
from kvharbor.engines.transformers.identity import model_identity
from kvharbor.engines.transformers.layout import layout_for
from kvharbor.engines.transformers.model import LoadedModel, load_smollm2, smollm2_folder
from kvharbor.engines.transformers.naming import this_engine
from kvharbor.engines.transformers.sampling import Sampling
from kvharbor.engines.transformers.step import Row
from kvharbor.engines.transformers.worker import Generation, Handover, Worker

__all__ = [
    "Admission",
    "AttentionUnsupported",
    "CacheForeign",
    "Generation",
    "Handover",
    "LoadedModel",
    "ModelMissing",
    "PoolModel",
    "RequestInvalid",
    "Row",
    "Sampling",
    "TransformersEngineError",
    "Worker",
    "layout_for",
    "load_smollm2",
    "model_identity",
    "smollm2_folder",
    "this_engine",
]
