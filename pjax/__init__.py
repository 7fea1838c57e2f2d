"""pjax: activation-sparse LLMs in JAX. Hot neurons on the device, cold ones on the host, the rest skipped."""

from pjax.base import VERSION as __version__
from pjax.base import ActivationStats, HardwareSpec, Placement, Predictors
from pjax.formats import load_tokenizer
from pjax.generate import Generation
from pjax.hardware import hardware_preset, measure_hardware
from pjax.layers import SparseFfn
from pjax.llm import LLM
from pjax.model import Decoder
from pjax.model_config import ModelConfig
from pjax.ops import pack_ffn, sparse_ffn, unpack_ffn
from pjax.placement import solve_placement
from pjax.profiler import collect_stats
from pjax.split import merge_ffn, split_ffn
from pjax.storage import load_model, quantize, save_model
from pjax.training import train_predictors
from pjax.weights import Ffn, PackedFfn

__all__ = [
    "LLM",
    "ActivationStats",
    "Decoder",
    "Ffn",
    "Generation",
    "HardwareSpec",
    "ModelConfig",
    "PackedFfn",
    "Placement",
    "Predictors",
    "SparseFfn",
    "__version__",
    "collect_stats",
    "hardware_preset",
    "load_model",
    "load_tokenizer",
    "measure_hardware",
    "merge_ffn",
    "pack_ffn",
    "quantize",
    "save_model",
    "solve_placement",
    "sparse_ffn",
    "split_ffn",
    "train_predictors",
    "unpack_ffn",
]
