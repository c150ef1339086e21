"""The models, one per file; listed by import path, so that looking at the list loads no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

CTR_MODELS: dict[str, str] = {
    "ctrdnn": "heterps_core.models.ctr_dnn:build",
    "ctrdnn-16": "heterps_core.models.ctr_dnn:build_16_layers",
    "matchnet": "heterps_core.models.matchnet:build",
    "2emb": "heterps_core.models.two_emb:build",
    "nce": "heterps_core.models.nce:build",
}
"""Click models: everything in the line works with them."""

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
