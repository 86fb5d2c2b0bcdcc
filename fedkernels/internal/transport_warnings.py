"""The warnings of unbalanced_ot. On a GPU the host does not wait for a solution: a later call reads what it was."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from fedkernels.internal.autograd import is_transformed, is_without_data
from fedkernels.reference.unbalanced_ot import TransportInfo


class _Unread(NamedTuple):
    """What a call on a GPU found, on its way to the host."""

    facts: Tensor
    arrival: torch.cuda.Event
    problems: int
    tol: float


_unread: _Unread | None = None


def warn(info: TransportInfo, tol: float) -> None:
    """Warns of problems that transport nothing, or were not solved to the tolerance; to be called by a public function.

    The stack level is such that Python shows a warning once for each line that calls the public function.
    """
    global _unread
    if torch.compiler.is_compiling() or is_transformed():  # a warning that depends on data would break the graph
        return
    problems, on_gpu = info.gap.numel(), info.gap.is_cuda
    if is_without_data(info.gap) or problems == 0 or (on_gpu and _is_captured(info.gap.device)):
        return
    late = info.gap > tol
    facts = torch.stack([(info.transported_mass == 0).sum(), late.sum(), torch.where(late, info.gap, 0).max()])
    if not on_gpu:
        _tell(facts, problems, tol, "")
        return
    earlier = _unread
    if earlier is not None and not earlier.arrival.query():
        return  # at most one is on its way, however fast calls follow each other
    _unread = _Unread(*_copy_to_host(facts), problems, tol)
    if earlier is not None:
        _tell(earlier.facts, earlier.problems, earlier.tol, " of an earlier call on a GPU")


def _is_captured(gpu: torch.device) -> bool:
    """Does a CUDA graph capture this GPU's current stream? It would break where an event is asked or recorded."""
    with torch.cuda.device(gpu):
        return torch.cuda.is_current_stream_capturing()


def _copy_to_host(facts: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Begins a copy. -> it, and the event that tells its arrival."""
    with torch.cuda.device(facts.device):
        copy = torch.empty(facts.shape, dtype=facts.dtype, pin_memory=True).copy_(facts, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return copy, arrival


def _tell(facts: Tensor, problems: int, tol: float, where: str) -> None:
    idle, late, worst = facts.tolist()
    if idle:
        warnings.warn(
            f"the optimum transports nothing in {idle:.0f} of {problems} problems{where}, so the gradient in cost is "
            "zero: every cost is at least tau_a * a + tau_b * b. Scale the cost down, or raise tau_a and tau_b",
            UserWarning,
            stacklevel=4,
        )
    if late:
        warnings.warn(
            f"max_iterations reached in {late:.0f} of {problems} problems{where} at a relative gap of up to "
            f"{worst:.1e}, above tol = {tol:.1e}. Raise max_iterations or tol, or use method='interior_point'",
            RuntimeWarning,
            stacklevel=4,
        )
