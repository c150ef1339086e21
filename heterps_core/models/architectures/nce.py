"""NCE: word vectors trained by distinguishing true pairs of context and word from noise.

Three tables as in the public word2vec example of PaddleRec: vectors of the context's words, and a vector and a bias
for each word that is distinguished from noise. Here a slot's value is a word; the first half of the slots is the
context, averaged as in CBOW (Mikolov et al. 2013), and the others are its words. A row with a click is a true pair.
Rows without one stand for drawn noise, whose rate k and distribution are not known: log(k P_n), which the logit of
noise-contrastive estimation subtracts (Gutmann and Hyvaerinen 2010), is therefore learned, as one number. Dense
features are no words and are left out.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError
from heterps_core.models.slot_embedding import SlotEmbedding

EMBEDDING_DIMENSION = 10


class _ContextMean(nn.Module):
    """Averages the vectors of all words of the context: [B, words * dimension] -> [B, dimension]."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dimension = dimension

    def forward(self, activation_BW: Tensor) -> Tensor:
        """Return [B, dimension]."""
        return activation_BW.reshape(activation_BW.shape[0], -1, self.dimension).mean(1)


class _NoiseContrast(nn.Module):
    r"""Returns the logit that a row's words belong to its context and are no noise.

    :math:`\sum_w (h \cdot v_w + b_w) - \log(k P_n)` with the context's mean h, the vector v and bias b of each word,
    and the learned last term. The columns that come in are h, all v, all b.
    """

    def __init__(self, dimension: int, num_words: int) -> None:
        super().__init__()
        self.dimension = dimension
        self.num_words = num_words
        self.log_noise = nn.Parameter(torch.zeros(1))

    def forward(self, activation_BW: Tensor) -> Tensor:
        """Return [B, 1]."""
        first_bias = self.dimension * (1 + self.num_words)
        context = activation_BW[:, : self.dimension]
        vectors = activation_BW[:, self.dimension : first_bias]
        biases = activation_BW[:, first_bias:]
        words = vectors.reshape(-1, self.num_words, self.dimension).sum(1)
        return (context * words).sum(1, keepdim=True) + biases.sum(1, keepdim=True) - self.log_noise


def build(features: FeatureSpec, *, embedding_dim: int = EMBEDDING_DIMENSION) -> nn.Sequential:
    """Build the chain for the given slots.

    Raises:
        ConfigurationError: There are fewer than two slots, one for the context and one for a word.
    """
    if features.num_slots < 2:
        raise ConfigurationError(
            f"nce needs at least 2 slots, one for the context and one for a word, got {features.num_slots}; "
            f"take ctrdnn"
        )
    num_context_slots = features.num_slots // 2
    words = range(num_context_slots, features.num_slots)
    context = SlotEmbedding(
        features, dimension=embedding_dim, slots=range(num_context_slots), include_dense=False
    )
    vectors = SlotEmbedding(
        features, dimension=embedding_dim, slots=words, include_dense=False, input_width=embedding_dim
    )
    biases = SlotEmbedding(
        features, dimension=1, slots=words, include_dense=False, input_width=vectors.output_width
    )
    return nn.Sequential(
        OrderedDict(
            context_embedding=context,
            context_mean=_ContextMean(embedding_dim),
            word_embedding=vectors,
            word_bias=biases,
            noise_contrast=_NoiseContrast(embedding_dim, len(words)),
        )
    )
