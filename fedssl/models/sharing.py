"""Whether processes can share a model's batches (`training.processes`)."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def sharing_problem(model: nn.Module) -> str | None:
    """The first layer whose output would not be that of the whole batch, and why; None where there is none.

    BatchNorm's statistics are taken over all processes (`data_parallel.batch_norm`). What draws random numbers draws
    them for the images of a batch together, and other layers with running statistics have statistics of their own.
    """
    for name, module in model.named_modules():
        kind = f"{name} ({type(module).__name__})"
        dropped = module.p if isinstance(module, _DropoutNd) else getattr(module, "drop_prob", None)  # timm's DropPath
        if dropped:
            return f"{kind} drops values at random"
        if not isinstance(module, _BatchNorm) and getattr(module, "running_var", None) is not None:
            return f"{kind} has running statistics and is no BatchNorm"
    return None
