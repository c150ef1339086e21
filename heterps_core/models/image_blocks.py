"""Image classifiers as chains of blocks that the training engine can run.

A device is chosen for what has weights: each convolution, inception block or fully connected layer makes a block with
the layers behind it that have none worth placing. So AlexNet has its 8 blocks and VGG-16 its 16.

Shapes: B rows, C classes.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from heterps_core.models.image_chain import build_image_chain

ANIMALS = (2, 3, 4, 5, 6, 7)
"""Classes of CIFAR-10 from bird to horse; the other four are vehicles."""

VEHICLES = (0, 1, 8, 9)


class AnimalLogit(nn.Module):
    """Joins ten classes to two: log-odds of an animal against a vehicle, [B, 10] -> [B, 1].

    The engine's loss is that of one logit. With p = softmax(z),

        log(sum of p over animals / sum of p over vehicles) = logsumexp(z of animals) - logsumexp(z of vehicles)

    so all ten logits learn, and the rest of the network has the work of ten classes.
    """

    def forward(self, logits_BC: Tensor) -> Tensor:
        """Return the log-odds."""
        animal_B = logits_BC[:, ANIMALS].logsumexp(dim=1)
        return (animal_B - logits_BC[:, VEHICLES].logsumexp(dim=1)).unsqueeze(1)


def block_sizes(chain: nn.Sequential) -> list[int]:
    """Return how many layers of an image classifier each block takes, in order.

    Example:
        >>> block_sizes(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Linear(8, 2)))
        [3, 1]
    """
    sizes: list[int] = []
    for layer in chain:
        has_weights = any(parameter.dim() > 1 for parameter in layer.parameters())
        if has_weights or not sizes:
            sizes.append(0)
        sizes[-1] += 1
    return sizes


def build_image_blocks(model: str, *, seed: int) -> nn.Sequential:
    """Build an image classifier as blocks: [B, *IMAGE_SHAPE] -> one logit [B, 1].

    Raises:
        UnknownNameError: The name is not in `CNN_MODELS`.
    """
    chain = build_image_chain(model, seed=seed)
    named = iter(chain.named_children())
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for size in block_sizes(chain):
        layers = OrderedDict(next(named) for _ in range(size))
        blocks[next(iter(layers))] = nn.Sequential(layers)
    last = blocks[next(reversed(blocks))]
    assert isinstance(last, nn.Sequential)
    last.append(AnimalLogit())
    return nn.Sequential(blocks)
