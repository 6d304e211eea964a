"""Early warning."""

import itertools

import torch.nn as nn


def mlp(*sizes: int) -> nn.Sequential:
    """A perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for given, made in itertools.pairwise(sizes):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
