"""An averaged copy, checkpoints that are loaded again in the middle, pickles, and files in the end."""

import copy
import hashlib
import io
import pickle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
for step in range(30):
    if step == 10:
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "all": model}, saved)
        frozen = copy.deepcopy(model).eval()
    if step == 20:
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    x = torch.randn(12, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    if step > 10:
        loss = loss + 0.1 * (model(x) - frozen(x)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averaged.update_parameters(model)
torch.save(averaged.state_dict(), "averaged.pth")
again = pickle.loads(pickle.dumps(model))
print(type(again) is Net, loss.item(), hashlib.sha256(pickle.dumps(model.layers[0].weight.tolist())).hexdigest()[:12])
print(sorted(vars(model)), optimizer.step.__name__)
