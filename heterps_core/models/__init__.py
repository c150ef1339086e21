"""The models, one per file; listed by import path, so that looking at the list loads no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from heterps_core.errors import ConfigurationError

CTR_MODELS: dict[str, str] = {
    "ctrdnn": "heterps_core.models.architectures.ctr_dnn:build",
    "ctrdnn-16": "heterps_core.models.architectures.ctr_dnn:build_16_layers",
    "matchnet": "heterps_core.models.architectures.matchnet:MatchNet",
    "2emb": "heterps_core.models.architectures.two_emb:TwoEmb",
    "nce": "heterps_core.models.architectures.nce:build",
    "lr": "heterps_core.models.architectures.parts:Wide",
    "wide-deep": "heterps_core.models.architectures.wide_deep:WideDeep",
    "deepfm": "heterps_core.models.architectures.deepfm:DeepFM",
    "cross-deep": "heterps_core.models.architectures.cross_deep:build",
    "dlrm": "heterps_core.models.architectures.dlrm:DLRM",
    "dcnv2": "heterps_core.models.architectures.dcn:DCN",
    "din": "heterps_core.models.architectures.histories.din:DIN",
    "mmoe": "heterps_core.models.architectures.mmoe:MMoE",
    "ple": "heterps_core.models.architectures.ple:PLE",
    "rankmixer": "heterps_core.models.architectures.rank_mixer:RankMixer",
    "wukong": "heterps_core.models.architectures.wukong:Wukong",
    "sasrec": "heterps_core.models.architectures.histories.sasrec:SASRec",
    "hstu": "heterps_core.models.architectures.histories.hstu:HSTU",
}
"""Click models: everything in the line works with them."""

DEFAULT_MODEL = "cross-deep"
"""Better than all others on most of the rows that models are judged on (docs/QUALITY.md)."""

Setting: TypeAlias = bool | int | float | Sequence[int]
"""Setting of a model: a number, or widths of layers, whose names end with "widths"."""

SIZES: dict[str, dict[str, Setting]] = {
    "s": {"embedding_dim": 4, "hidden_widths": (64, 32), "cross_layers": 1, "cross_rank": 32},
    "m": {},
    "l": {"hidden_widths": (256, 128), "cross_layers": 3, "cross_rank": 128},
}
"""Settings of the default model by its size; what each costs and gives is measured in docs/QUALITY.md."""

PAPER_MODELS = ("ctrdnn", "ctrdnn-16", "matchnet", "2emb", "nce")
"""Models of the HeterPS paper and of PaddlePaddle's examples, on which search methods are compared."""

_SIZED = re.compile(r"([^()]+)\((\w+=[^,()=]+(?:, \w+=[^,()=]+)*)\)")


def sized_model(model: str, /, **settings: Setting | None) -> str:
    """Return the name of a model that is built with other settings than its own; None leaves one as it is.

    Raises:
        ConfigurationError: A name is none of Python's; or one that ends with "widths" has no list, or another has.

    Example:
        >>> sized_model("ctrdnn", hidden_widths=[64, 32], embedding_dim=8)
        'ctrdnn(hidden_widths=64-32, embedding_dim=8)'
    """
    shown = [f"{name}={_text(name, value)}" for name, value in settings.items() if value is not None]
    return f"{model}({', '.join(shown)})" if shown else model


def sizes_of(model: str) -> tuple[str, dict[str, Setting]]:
    """Return the name without settings, and the settings that `sized_model` gave it."""
    match = _SIZED.fullmatch(model)
    if match is None:
        return model, {}
    name, settings = match.groups()
    named = (setting.split("=") for setting in settings.split(", "))
    return name, {each: _value(each, text) for each, text in named}


def _text(name: str, value: Setting) -> str:
    if not name.isidentifier():
        raise ConfigurationError(f"a model setting must be named as a parameter in Python is, got {name!r}")
    if name.endswith("widths") != isinstance(value, Sequence):
        kind = "a list of whole numbers" if name.endswith("widths") else "a number"
        raise ConfigurationError(f"the model setting {name} must be {kind}, got {value!r}")
    return "-".join(map(str, value)) if isinstance(value, Sequence) else repr(value)


def _value(name: str, text: str) -> Setting:
    if name.endswith("widths"):
        return tuple(map(int, text.split("-")))
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else float(text)
