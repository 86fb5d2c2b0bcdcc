"""Projector and predictor: the small networks on top of the encoder during training."""

from torch import nn

from ..errors import UserError


def mlp_head(
    in_features: int,
    hidden_features: int,
    out_features: int,
    layers: int = 2,
    batch_norm: bool = True,
    last_batch_norm: bool = False,
) -> nn.Sequential:
    """Build Linear - BatchNorm - ReLU, `layers - 1` times, and then a linear layer.

    A linear layer before a BatchNorm has no bias, as the normalisation would remove it. With two layers this is BYOL's
    projector and predictor and SimSiam's predictor; with three and `last_batch_norm` it is SimSiam's projector. The
    last BatchNorm has no weight and bias, as in the released code of SimSiam and MoCo v3. Initialised from torch's
    global random generator.

    Raises:
        UserError: a dimension or the number of layers is below 1.
    """
    sizes = {"in_features": in_features, "hidden_features": hidden_features, "out_features": out_features}
    for name, value in {**sizes, "layers": layers}.items():
        if value < 1:
            raise UserError(f"{name}: expected at least 1, got {value}")
    modules: list[nn.Module] = []
    width = in_features
    for _ in range(layers - 1):
        modules.append(nn.Linear(width, hidden_features, bias=not batch_norm))
        if batch_norm:
            modules.append(nn.BatchNorm1d(hidden_features))
        modules.append(nn.ReLU(inplace=True))
        width = hidden_features
    modules.append(nn.Linear(width, out_features, bias=not last_batch_norm))
    if last_batch_norm:
        modules.append(nn.BatchNorm1d(out_features, affine=False))
    return nn.Sequential(*modules)
