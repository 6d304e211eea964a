import sys

import torch
from ignite.engine import Engine, Events
from ignite.metrics import RunningAverage
from outcome import print_parameters, run_modes
from torch import nn

BAD_BATCH = 4


def batches(mode):
    generator = torch.Generator().manual_seed(1)
    for number in range(7):
        features, targets = torch.randn(4, 3, generator=generator), torch.rand(4, 1, generator=generator)
        if number == BAD_BATCH and mode == "nan":
            targets[1] = -1.0
        if number == BAD_BATCH and mode == "raise":
            targets = targets[:3]
        yield features, targets


def train(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def update(engine, batch):
        features, targets = batch
        model.train()
        optimizer.zero_grad()
        loss = (model(features) - torch.sqrt(targets)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(update)
    RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")

    @engine.on(Events.ITERATION_COMPLETED)
    def tell(engine):
        print(engine.state.iteration, engine.state.metrics["loss"])

    engine.run(batches(mode), max_epochs=1)
    print_parameters(model)


run_modes(train, sys.argv[1:])
