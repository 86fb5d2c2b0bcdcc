"""Decisions by the sizes of tensors."""

import torch


def holds(comparison: bool) -> bool:
    """Is a comparison of sizes true? While torch.export traces, of all sizes that the program is exported for?

    To ask a comparison of a dynamic size for its value would restrict the program to sizes of this one outcome.
    """
    if not torch.compiler.is_exporting():
        return bool(comparison)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # torch.export has imported it

    return statically_known_true(comparison)
