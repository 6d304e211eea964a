"""Early warning."""

import itertools

import torch.nn as nn


def mlp(*sizes: int) -> nn.Sequential:
    """A perceptron with ReLU between its layers."""
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())][:-1])
