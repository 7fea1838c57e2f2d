"""What a Hugging Face config.json means: one small table of facts per family.

A new family is a function from its config.json to `ModelConfig`, a table of tensor names, and an entry in
a dict of `Family` records; the decoder is described by the config and knows no families.
"""

from pjax.formats.config_file import ConfigFile
from pjax.formats.families.falcon import FALCON_FAMILIES
from pjax.formats.families.family import Family, Source
from pjax.formats.families.layout import layout_of, to_files
from pjax.formats.families.llama import LLAMA_FAMILIES
from pjax.formats.families.opt import OPT_FAMILIES

__all__ = ["FAMILIES", "Family", "Source", "find_family", "layout_of", "to_files"]

FAMILIES: dict[str, Family] = LLAMA_FAMILIES | OPT_FAMILIES | FALCON_FAMILIES
"""Supported families by the first entry of `architectures`."""


def find_family(config: ConfigFile) -> Family:
    """Returns the family that a config names by `architectures`, or by `model_type` if it has none.

    Raises:
        ValueError: a family, or a way of storing weights, that is not supported.
    """
    supported = ", ".join(FAMILIES)
    architectures, model_type = config.values.get("architectures"), config.values.get("model_type")
    if architectures:
        name = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(name, str) or name not in FAMILIES:
            raise config.unsupported("architectures", name, supported)
        family = FAMILIES[name]
    else:
        by_type = {kind: family for family in FAMILIES.values() for kind in family.model_types}
        if not isinstance(model_type, str) or model_type not in by_type:
            raise config.unsupported("model_type", model_type, ", ".join(by_type))
        family = by_type[model_type]
    if model_type is not None and model_type not in family.model_types:
        raise config.unsupported(
            "model_type", model_type, f"{', '.join(family.model_types)} with {supported}"
        )
    if config.values.get("quantization_config"):
        raise config.unsupported("quantization_config", config.values["quantization_config"], "float weights")
    return family
