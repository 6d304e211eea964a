"""What the training scripts of these tests have in common: their modes one after another, and what they print."""

import gc
import hashlib
import sys
import traceback

import torch
from torch.optim import optimizer


def run_modes(train, modes):
    """Train once in each mode; what ends a training ends the script only in the last one."""
    for number, mode in enumerate(modes, start=1):
        print("mode", mode)
        try:
            train(mode)
        except (Exception, SystemExit) as error:
            if number == len(modes):
                raise
            if isinstance(error, SystemExit):
                print("stopped with", error.code)
            else:
                traceback.print_exc()


def print_parameters(model):
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().numpy().tobytes())
    print("parameters", digest.hexdigest())


def print_left_behind():
    """Everything that a capture puts in place while it runs, and must have taken away."""
    gc.collect()
    own_calls = [cls.__name__ for cls in subclasses(torch.nn.Module) if "__call__" in vars(cls)]
    print(
        "left behind",
        torch._C._len_torch_function_stack(),
        sys.excepthook is sys.__excepthook__,
        torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl,
        sorted(own_calls),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        torch.nn.utils.clip_grad_norm_.__module__,
        torch.autograd.backward.__module__,
    )


def subclasses(cls):
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))
