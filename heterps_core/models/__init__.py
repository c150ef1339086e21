"""The models, one per file; listed by import path, so that looking at the list loads no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

CTR_MODELS: dict[str, str] = {
    "ctrdnn": "heterps_core.models.architectures.ctr_dnn:build",
    "ctrdnn-16": "heterps_core.models.architectures.ctr_dnn:build_16_layers",
    "matchnet": "heterps_core.models.architectures.matchnet:build",
    "2emb": "heterps_core.models.architectures.two_emb:build",
    "nce": "heterps_core.models.architectures.nce:build",
    "lr": "heterps_core.models.architectures.parts:Wide",
    "wide-deep": "heterps_core.models.architectures.wide_deep:WideDeep",
    "deepfm": "heterps_core.models.architectures.deepfm:DeepFM",
    "dlrm": "heterps_core.models.architectures.dlrm:DLRM",
    "dcnv2": "heterps_core.models.architectures.dcn:DCN",
    "xdeepfm": "heterps_core.models.architectures.xdeepfm:XDeepFM",
    "finalmlp": "heterps_core.models.architectures.final_mlp:FinalMLP",
    "autoint": "heterps_core.models.architectures.autoint:AutoInt",
    "din": "heterps_core.models.architectures.din:DIN",
    "mmoe": "heterps_core.models.architectures.mmoe:MMoE",
}
"""Click models: everything in the line works with them."""

PAPER_MODELS = ("ctrdnn", "ctrdnn-16", "matchnet", "2emb", "nce")
"""Those of the HeterPS paper and of PaddlePaddle's examples, on which search methods are compared."""

_SIZED = re.compile(
    r"([^()]+)\((?:hidden_widths=(\d+(?:-\d+)*))?(?:, )?(?:embedding_dim=(\d+))?\)",
)


def sized_model(model: str, *, hidden_widths: Sequence[int] | None, embedding_dim: int | None) -> str:
    """Return the name of a model that is built with other sizes than its own; None leaves a size as it is.

    Example:
        >>> sized_model("ctrdnn", hidden_widths=[64, 32], embedding_dim=8)
        'ctrdnn(hidden_widths=64-32, embedding_dim=8)'
    """
    sizes = [f"hidden_widths={'-'.join(map(str, hidden_widths))}"] if hidden_widths else []
    sizes += [f"embedding_dim={embedding_dim}"] if embedding_dim else []
    return f"{model}({', '.join(sizes)})" if sizes else model


def sizes_of(model: str) -> tuple[str, dict[str, int | tuple[int, ...]]]:
    """Return the name without sizes, and the sizes by which `sized_model` changed it."""
    match = _SIZED.fullmatch(model)
    if match is None:
        return model, {}
    name, widths, dimension = match.groups()
    sizes: dict[str, int | tuple[int, ...]] = {}
    if widths:
        sizes["hidden_widths"] = tuple(map(int, widths.split("-")))
    if dimension:
        sizes["embedding_dim"] = int(dimension)
    return name, sizes
