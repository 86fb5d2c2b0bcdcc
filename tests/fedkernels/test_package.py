"""The surface of fedkernels and its independence from fedssl."""

import subprocess
import sys

import torch

import fedkernels


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
