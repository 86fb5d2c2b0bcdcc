"""The surface of fedkernels and its independence from fedssl."""

import inspect
import subprocess
import sys
from typing import Literal

import pytest
import torch

import fedkernels
from fedkernels import distributed, nn


def test_public_names():
    operators = {
        "apply_deltas",
        "client_weights",
        "clip_loss",
        "compare",
        "debiased_cka",
        "debiased_cka_pairwise",
        "delta_gram",
        "info_nce",
        "linear_cka",
        "linear_cka_pairwise",
        "linear_cka_to_kernel",
        "nt_xent",
        "sigmoid_loss",
        "supervised_contrastive_loss",
        "two_views",
        "unbalanced_ot",
        "unbalanced_ot_plan",
        "view_parameters",
    }
    records = {
        "CKAAccumulator",
        "Comparison",
        "MinibatchCKA",
        "TransportInfo",
        "ViewKey",
        "ViewOptions",
        "ViewParameters",
    }
    assert operators | records | {"build_info", "self_test", "nn", "__version__"} == set(fedkernels.__all__)
    assert all(getattr(fedkernels, name).__doc__ and callable(getattr(fedkernels, name)) for name in operators)
    assert fedkernels.__version__[0].isdigit()


# loss: its module, and what it does not have on several ranks
LOSSES = {
    "info_nce": ("InfoNCE", {"positives", "labels", "excluded", "recompute"}),
    "nt_xent": ("NTXent", set()),
    "clip_loss": ("CLIPLoss", set()),
    "sigmoid_loss": ("SigmoidLoss", set()),
    "supervised_contrastive_loss": ("SupervisedContrastiveLoss", None),  # not on several ranks
}


def options_of(function):
    """Name, default and type of each parameter, in order."""
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.default, one.annotation) for one in parameters]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_has_one_set_of_names(loss):
    """Its module and its function for several ranks have the names, order, defaults and types of the function."""
    module, alone = LOSSES[loss]
    of_function = options_of(getattr(fedkernels, loss))
    assert ("reduction", "mean", Literal["mean", "sum", "none"]) in of_function
    made, called = options_of(getattr(nn, module)), options_of(getattr(nn, module).forward)[1:]  # without self
    assert made == [one for one in of_function if one in made]
    assert called == [one for one in of_function if one in called]
    assert len(made) + len(called) == len(of_function)
    if alone is None:
        assert loss not in distributed.__all__
        return
    on_ranks = options_of(getattr(distributed, loss))
    assert on_ranks[:-2] == [one for one in of_function if one[0] not in alone]
    assert [name for name, *_ in on_ranks[-2:]] == ["method", "group"]
    assert on_ranks[-2][1:] == ("gather", Literal["gather", "ring"])


def test_modules_hold_no_parameters_and_print_their_options():
    modules = [fedkernels.nn.InfoNCE(0.2), fedkernels.nn.NTXent(0.5, "sum"), fedkernels.nn.CKALoss(True)]
    assert not any(list(module.parameters()) for module in modules)
    assert repr(modules[1]) == "NTXent(temperature=0.5, reduction='sum')"
    assert isinstance(modules[2], torch.nn.Module)


def test_import_is_alone():
    """Neither fedssl nor torch's compiler comes along."""
    code = "import sys, fedkernels; fedkernels.info_nce; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"fedssl", "torch._inductor"} & set(result.stdout.split())


def test_the_former_import_paths_give_the_same_objects():
    from fedkernels.drop_in.lightly import NTXentLoss

    from fedkernels.compat import lightly, pot
    from fedkernels.pot import mm_unbalanced

    assert NTXentLoss is lightly.NTXentLoss
    assert mm_unbalanced is pot.mm_unbalanced
