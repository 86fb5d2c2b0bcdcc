"""The Gram matrix of the clients' updates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels.internal import checks, native
from fedkernels.reference.delta_gram import delta_gram as _reference


def delta_gram(global_params: Sequence[Tensor], client_params: Sequence[Sequence[Tensor]]) -> Tensor:
    """``G_ij = <delta_i, delta_j>`` with ``delta_k = global - client_k``, over all tensors of a model.

    The tensors are read in place: no model is flattened and no delta is stored as a whole. Source: the G of FedU2
    (Liao et al. 2024), Eq. 10, is this matrix with row and column k divided by ``G_kk / 2``, since
    ``grad log |theta_g - theta_k|^2 = 2 delta_k / |delta_k|^2``.

    Args:
        global_params: T >= 1 tensors, float16, bfloat16, float32 or float64, any shapes and strides.
        client_params: K >= 1 lists of T tensors with the shapes and devices of the global ones; dtypes may differ.

    Returns:
        [K, K] in float64, exactly symmetric, on the device of the first tensor. Differences and sums are float64
        too. Not differentiable: the result is detached.

    Raises:
        TypeError: not lists of floating tensors (leave integer buffers, such as BatchNorm's counters, out).
        ValueError: an empty list; a tensor that differs from the global one in shape or device (its index is named).
    """
    checks.parameter_lists(global_params, client_params)
    clients = [tensor for params in client_params for tensor in params]
    operator = native.operator("delta_gram", *global_params)  # each client's tensor is on its global tensor's device
    if operator is None:
        return _reference(global_params, client_params)
    with torch.no_grad():
        return operator([tensor.contiguous() for tensor in global_params], [tensor.contiguous() for tensor in clients])


if native.module is not None:

    @torch.library.register_fake("fedkernels::delta_gram")
    def _(global_params: list[Tensor], client_params: list[Tensor]) -> Tensor:
        clients = len(client_params) // len(global_params)
        return global_params[0].new_empty((clients, clients), dtype=torch.float64)
