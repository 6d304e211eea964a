"""Threads that compute meanwhile, handlers of the log, exit functions, streams and signals that the script sets."""

import atexit
import logging
import signal
import sys
import threading

import torch
from torch import nn

lines = []


class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())


logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
logging.getLogger().addHandler(Lines())
atexit.register(lambda: print("end", len(lines), threading.active_count()))
signal.signal(signal.SIGUSR1, lambda *_: lines.append("signal"))
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
results, lock = [], threading.Lock()


def compute(number):
    weight = torch.full((3, 3), float(number), requires_grad=True)
    nn.functional.linear(torch.ones(2, 3), weight).sum().mul(0.5).backward()
    with lock:
        results.append(round(weight.grad.sum().item()) + number)


for step in range(10):
    threads = [threading.Thread(target=compute, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    loss = (model(torch.randn(5, 3)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for thread in threads:
        thread.join()
    signal.raise_signal(signal.SIGUSR1)
    logging.info("step %d: %.6f", step, loss.item())
print(sorted(set(results)), lines.count("signal"), logging.getLogger("torch").handlers)
sys.stdout.flush()
sys.exit(7)
