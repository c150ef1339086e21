"""The models, one per file; listed here and nowhere else.

A model is named by the import path of the function that builds it, so that looking at the list loads no torch.
"""

CTR_MODELS: dict[str, str] = {
    "ctrdnn": "heterps_core.models.ctr_dnn:build",
    "ctrdnn-16": "heterps_core.models.ctr_dnn:build_16_layers",
    "matchnet": "heterps_core.models.matchnet:build",
    "2emb": "heterps_core.models.two_emb:build",
    "nce": "heterps_core.models.nce:build",
}
