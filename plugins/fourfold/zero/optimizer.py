"""The torch optimizer under ZeRO, and which parameters decay."""

import torch
from torch import nn

from fourfold.schema import OptimConfig


def build_optimizer(module: nn.Module, *, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or SGD with two groups: matrices (and embeddings) decay, norms and biases do not.

    The rule looks at the global number of dimensions, so call it before anything flattens or partitions parameters;
    for ZeRO-3 parameters the global shape is `ds_shape`.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if dimensions(p) > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if dimensions(p) <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.momentum)
    return torch.optim.AdamW(
        groups,
        lr=optim.learning_rate,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_epsilon,
        fused=True,
    )


def dimensions(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))
