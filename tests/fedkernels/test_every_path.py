"""Every public path has a reference, a gradcheck, an opcheck, a compiled graph and a form on CUDA, or a stated reason.

The table names the test of each. That the tests pass is shown by themselves; here it is seen that they exist, and that
nothing public is without a row.
"""

import ast
import importlib
import pathlib
import re
from typing import NamedTuple

import pytest
import torch

import fedkernels
from fedkernels import distributed
from fedkernels.internal import native
from tests.cuda_on_cpu.emulation import ROOT

PACKAGE = pathlib.Path(fedkernels.__file__).parent


class Because(str):
    """Why there is no such test."""


class Path(NamedTuple):
    """Of each a test, by its place below tests/, or a reason."""

    reference: str  # values against something independent
    gradcheck: str  # in float64
    opcheck: str  # of the compiled operator
    compiles: str  # fullgraph=True, with the values of eager mode
    on_cuda: str  # kernels in the emulation, or what serves instead of them


NO_GRADIENT = Because("the result carries no gradient")
NO_OPERATOR = Because("it calls PyTorch's own operators alone")
LIKE_ANY_TENSOR = Because("it calls PyTorch's own operators alone, which run on CUDA too")

OPCHECK = "fedkernels/test_compiled_operators.py::test_opcheck"
ALL_CONTEXTS = "fedkernels/test_contexts.py::test_compiles_without_a_graph_break"
KERNELS = "cuda_on_cpu/test_bindings.py::test_case"
WITHOUT_KERNELS = "cuda_on_cpu/test_bindings.py::test_without_own_kernels"
MODULES = "fedkernels/test_contexts.py::test_modules_move_and_store_like_any_other"
INFO_NCE = "fedkernels/test_info_nce.py::test_"
TRANSPORT = "fedkernels/test_unbalanced_ot.py::test_"
STIFF = "fedkernels/test_unbalanced_ot_stiff.py::test_"
CLIENT_WEIGHTS = "fedkernels/test_client_weights.py::test_"
ACCUMULATE = "fedkernels/test_accumulate_cka.py::test_"
ORIGINALS = "fedkernels/compat/test_originals.py::test_"
DROP_IN = "fedkernels/compat/test_gradients.py::test_"
DISTRIBUTED = "fedkernels/distributed/test_operator.py::test_"


def info_nce_with(option: str, operator: str, case: str) -> Path:
    return Path(
        INFO_NCE + "positives_negatives_and_pairs_left_out",
        f"{INFO_NCE}gradcheck_of_each_option[{option}]",
        f"{OPCHECK}[{operator}]",
        f"{INFO_NCE}each_option_compiles_without_a_graph_break[{option}]",
        f"{WITHOUT_KERNELS}[{case}]",
    )


def distributed_loss(name: str) -> Path:
    return Path(
        "fedkernels/distributed/test_losses.py::test_values_and_gradients_are_those_of_one_process",
        f"{DISTRIBUTED}gradcheck[{name}]",
        DISTRIBUTED + "opcheck",
        f"{DISTRIBUTED}compile[{name}]",
        DISTRIBUTED + "blocks_of_logits_join",
    )


# name of what is public, and after a comma which of its paths
PATHS = {
    "info_nce": Path(
        INFO_NCE + "equals_the_formula_by_loops",
        INFO_NCE + "gradcheck",
        f"{OPCHECK}[info_nce]",
        f"{ALL_CONTEXTS}[info_nce]",
        f"{KERNELS}[info_nce, float32]",
    ),
    "info_nce, a tensor of temperature": info_nce_with(
        "temperature", "info_nce", "info_nce, a tensor of temperature"
    )._replace(reference=INFO_NCE + "a_tensor_of_temperature_is_the_number"),
    "info_nce, positives by an offset": info_nce_with(
        "offset", "info_nce", "info_nce, an offset and negatives"
    )._replace(reference=INFO_NCE + "positives_by_an_offset"),
    "info_nce, negatives": info_nce_with("negatives", "info_nce", "info_nce, an offset and negatives"),
    "info_nce, a tensor of positives": info_nce_with(
        "positives", "similarity_logsumexp", "info_nce, positives and labels"
    ),
    "info_nce, labels": info_nce_with("labels", "similarity_logsumexp", "info_nce, positives and labels"),
    "info_nce, excluded": info_nce_with("excluded", "similarity_logsumexp", "info_nce, excluded"),
    "nt_xent": Path(
        "fedkernels/test_nt_xent.py::test_equals_the_formula_by_loops",
        "fedkernels/test_nt_xent.py::test_gradcheck",
        f"{OPCHECK}[nt_xent]",
        f"{ALL_CONTEXTS}[nt_xent]",
        f"{KERNELS}[nt_xent, float32]",
    ),
    "nt_xent, a tensor of temperature": Path(
        "fedkernels/test_nt_xent.py::test_a_tensor_of_temperature_gets_its_gradient",
        "fedkernels/test_nt_xent.py::test_a_tensor_of_temperature_gets_its_gradient",
        f"{OPCHECK}[nt_xent]",
        "fedkernels/test_nt_xent.py::test_compiles_without_a_graph_break",
        f"{WITHOUT_KERNELS}[nt_xent, a tensor of temperature]",
    ),
    "clip_loss": Path(
        "fedkernels/test_clip_loss.py::test_equals_cross_entropy_in_both_directions",
        "fedkernels/test_clip_loss.py::test_gradcheck",
        f"{OPCHECK}[similarity_logsumexp]",
        "fedkernels/test_clip_loss.py::test_compiles_without_a_graph_break",
        f"{WITHOUT_KERNELS}[clip_loss]",
    ),
    "supervised_contrastive_loss, an even number of rows": Path(
        "fedkernels/test_supervised_contrastive_loss.py::test_equals_the_formula_by_loops",
        "fedkernels/test_supervised_contrastive_loss.py::test_gradcheck[6]",
        f"{OPCHECK}[nt_xent]",
        "fedkernels/test_supervised_contrastive_loss.py::test_compiles_without_a_graph_break[6]",
        f"{WITHOUT_KERNELS}[supervised_contrastive_loss, an even number of rows]",
    ),
    "supervised_contrastive_loss, an odd number of rows": Path(
        "fedkernels/test_supervised_contrastive_loss.py::test_equals_the_formula_by_loops",
        "fedkernels/test_supervised_contrastive_loss.py::test_gradcheck[7]",
        f"{OPCHECK}[similarity_logsumexp]",
        "fedkernels/test_supervised_contrastive_loss.py::test_compiles_without_a_graph_break[7]",
        f"{WITHOUT_KERNELS}[supervised_contrastive_loss, an odd number of rows]",
    ),
    "sigmoid_loss": Path(
        "fedkernels/test_sigmoid_loss.py::test_equals_logsigmoid",
        "fedkernels/test_sigmoid_loss.py::test_gradcheck",
        f"{OPCHECK}[sigmoid_loss]",
        "fedkernels/test_sigmoid_loss.py::test_compiles_without_a_graph_break",
        f"{WITHOUT_KERNELS}[sigmoid_loss]",
    ),
    "linear_cka": Path(
        "fedkernels/test_linear_cka.py::test_equals_the_definition",
        "fedkernels/test_linear_cka.py::test_gradcheck",
        f"{OPCHECK}[linear_cka]",
        f"{ALL_CONTEXTS}[linear_cka]",
        f"{KERNELS}[linear_cka]",
    ),
    "linear_cka_to_kernel": Path(
        "fedkernels/test_linear_cka.py::test_same_numbers_in_feature_and_gram_space",
        "fedkernels/test_linear_cka.py::test_gradcheck",
        f"{OPCHECK}[linear_cka_to_kernel]",
        "fedkernels/test_linear_cka.py::test_compiles_without_a_graph_break",
        f"{KERNELS}[linear_cka_to_kernel]",
    ),
    "linear_cka_to_kernel, a gradient in the kernel": Path(
        "fedkernels/test_linear_cka.py::test_same_numbers_in_feature_and_gram_space",
        "fedkernels/test_linear_cka.py::test_gradcheck",
        NO_OPERATOR,
        f"{ALL_CONTEXTS}[linear_cka_to_kernel]",
        f"{WITHOUT_KERNELS}[linear_cka_to_kernel, a gradient in the kernel]",
    ),
    "linear_cka_pairwise": Path(
        "fedkernels/test_linear_cka.py::test_pairwise_of_ragged_widths",
        Because("where an input requires a gradient the reference serves: the next row"),
        f"{OPCHECK}[linear_cka_pairwise]",
        "fedkernels/test_linear_cka.py::test_compiles_without_a_graph_break",
        f"{KERNELS}[linear_cka_pairwise]",
    ),
    "linear_cka_pairwise, gradients": Path(
        "fedkernels/test_linear_cka.py::test_pairwise_of_ragged_widths",
        "fedkernels/test_linear_cka.py::test_gradcheck",
        NO_OPERATOR,
        f"{ALL_CONTEXTS}[linear_cka_pairwise]",
        f"{WITHOUT_KERNELS}[linear_cka_pairwise, gradients]",
    ),
    "debiased_cka": Path(
        "fedkernels/test_debiased_cka.py::test_equals_the_formula",
        "fedkernels/test_debiased_cka.py::test_gradcheck",
        f"{OPCHECK}[debiased_cka]",
        f"{ALL_CONTEXTS}[debiased_cka]",
        f"{WITHOUT_KERNELS}[debiased_cka]",
    ),
    "debiased_cka_pairwise": Path(
        "fedkernels/test_debiased_cka.py::test_equals_the_formula",
        "fedkernels/test_debiased_cka.py::test_gradcheck",
        f"{OPCHECK}[debiased_cka_pairwise]",
        f"{ALL_CONTEXTS}[debiased_cka_pairwise]",
        f"{WITHOUT_KERNELS}[debiased_cka_pairwise]",
    ),
    "CKAAccumulator": Path(
        ACCUMULATE + "equals_the_value_of_all_samples",
        NO_GRADIENT,
        f"{OPCHECK}[add_products]",
        Because("it writes rows in place, where torch.compile breaks its graph; test_compiled_it_gives_the_same"),
        f"{WITHOUT_KERNELS}[CKAAccumulator]",
    ),
    "MinibatchCKA": Path(
        ACCUMULATE + "minibatches_are_the_mean_of_unbiased_hsic",
        NO_GRADIENT,
        f"{OPCHECK}[hsic_pairwise]",
        ACCUMULATE + "compiled_it_gives_the_same",
        f"{WITHOUT_KERNELS}[MinibatchCKA]",
    ),
    "compare": Path(
        "fedkernels/test_compare_networks.py::test_equals_cka_of_all_outputs",
        NO_GRADIENT,
        NO_OPERATOR,
        Because("it hooks two networks in a loop over their data"),
        LIKE_ANY_TENSOR,
    ),
    "unbalanced_ot": Path(
        TRANSPORT + "equals_an_active_set_solver[accelerated]",
        TRANSPORT + "gradcheck",
        f"{OPCHECK}[unbalanced_ot]",
        TRANSPORT + "compiles_without_a_graph_break[accelerated]",
        f"{KERNELS}[unbalanced_ot]",
    ),
    "unbalanced_ot, interior point": Path(
        STIFF + "the_interior_point_equals_quadprog",
        STIFF + "gradcheck_of_a_stiff_problem",
        STIFF + "the_operators_keep_to_torchs_rules_with_other_methods[interior_point]",
        TRANSPORT + "compiles_without_a_graph_break[interior_point]",
        f"{WITHOUT_KERNELS}[unbalanced_ot, interior point]",
    ),
    "unbalanced_ot, steepest descent": Path(
        TRANSPORT + "equals_an_active_set_solver[steepest]",
        TRANSPORT + "gradcheck_of_steepest_descent",
        STIFF + "the_operators_keep_to_torchs_rules_with_other_methods[steepest]",
        TRANSPORT + "compiles_without_a_graph_break[steepest]",
        "cuda_on_cpu/test_unbalanced_ot.py::test_steepest_descent",
    ),
    "unbalanced_ot, masks": Path(
        STIFF + "masked_problems_are_the_smaller_ones",
        STIFF + "gradcheck_of_masked_problems",
        f"{OPCHECK}[unbalanced_ot]",
        STIFF + "one_mask_serves_a_batch_and_compiles",
        f"{KERNELS}[unbalanced_ot, masks]",
    ),
    "unbalanced_ot_plan": Path(
        TRANSPORT + "optimality_conditions",
        NO_GRADIENT,
        f"{OPCHECK}[unbalanced_ot]",
        f"{ALL_CONTEXTS}[unbalanced_ot_plan]",
        f"{KERNELS}[unbalanced_ot]",
    ),
    "client_weights": Path(
        CLIENT_WEIGHTS + "equals_quadprog",
        NO_GRADIENT,
        f"{OPCHECK}[client_weights]",
        CLIENT_WEIGHTS + "compiles_without_a_graph_break",
        f"{KERNELS}[client_weights]",
    ),
    "client_weights, lower bounds": Path(
        CLIENT_WEIGHTS + "lower_bounds_equal_quadprog",
        NO_GRADIENT,
        f"{OPCHECK}[client_weights]",
        CLIENT_WEIGHTS + "lower_bounds_of_one_number_and_of_the_whole",
        f"{KERNELS}[client_weights, lower bounds]",
    ),
    "delta_gram": Path(
        "fedkernels/test_delta_gram.py::test_equals_flattened_models",
        NO_GRADIENT,
        f"{OPCHECK}[delta_gram]",
        "fedkernels/test_delta_gram.py::test_compiles_without_a_graph_break",
        f"{WITHOUT_KERNELS}[delta_gram]",
    ),
    "apply_deltas": Path(
        "fedkernels/test_apply_deltas.py::test_equals_the_formula",
        NO_GRADIENT,
        f"{OPCHECK}[apply_deltas]",
        "fedkernels/test_apply_deltas.py::test_compiles_without_a_graph_break",
        f"{WITHOUT_KERNELS}[apply_deltas]",
    ),
    "two_views": Path(
        "fedkernels/test_two_views.py::test_equals_torchvisions_functions",
        NO_GRADIENT,
        f"{OPCHECK}[two_views]",
        "fedkernels/test_two_views.py::test_compiles_without_a_graph_break",
        f"{KERNELS}[two_views]",
    ),
    "view_parameters": Path(
        "fedkernels/test_view_parameters.py::test_philox_gives_the_published_words",
        NO_GRADIENT,
        NO_OPERATOR,
        "fedkernels/test_view_parameters.py::test_compiles_without_a_graph_break",
        LIKE_ANY_TENSOR,
    ),
    "distributed.info_nce": distributed_loss("info_nce"),
    "distributed.nt_xent": distributed_loss("nt_xent"),
    "distributed.clip_loss": distributed_loss("clip_loss"),
    "distributed.sigmoid_loss": distributed_loss("sigmoid_loss"),
    "distributed.supervised_contrastive_loss": distributed_loss("supervised_contrastive_loss")._replace(
        reference="fedkernels/distributed/test_losses.py::test_positives_by_label_are_those_of_all_ranks"
    ),
}
for module, function in (
    ("InfoNCE", "info_nce"),
    ("NTXent", "nt_xent"),
    ("CLIPLoss", "clip_loss"),
    ("SigmoidLoss", "sigmoid_loss"),
    ("SupervisedContrastiveLoss", "supervised_contrastive_loss"),
):
    of_function = next(path for name, path in PATHS.items() if name.partition(",")[0] == function)
    same = f"fedkernels/test_{function}.py::test_module_is_the_function"
    PATHS[f"nn.{module}"] = of_function._replace(reference=same, compiles=f"{MODULES}[{module}]")
PATHS |= {
    "nn.CKALoss": PATHS["linear_cka"]._replace(
        reference="fedkernels/test_contexts.py::test_module_of_cka", compiles=f"{MODULES}[CKALoss]"
    ),
    "compat.pot.mm_unbalanced": Path(
        "fedkernels/compat/test_pot.py::test_equals_pot",
        ORIGINALS + "pot_gives_the_gradient_of_the_total_cost",
        STIFF + "the_operators_keep_to_torchs_rules_with_other_methods[interior_point]",
        Because("as POT's it takes lists and arrays, which no graph holds; unbalanced_ot_plan compiles"),
        f"{WITHOUT_KERNELS}[unbalanced_ot, interior point]",
    ),
    "compat.torchjd_aggregators.MinimumNormWeighting": PATHS["client_weights, lower bounds"]._replace(
        reference="fedkernels/compat/test_torchjd.py::test_the_former_names_are_the_same_weights_with_a_lower_bound"
    ),
    "compat.open_clip.ClipLoss": PATHS["clip_loss"]._replace(
        reference=ORIGINALS + "open_clip_in_one_process",
        gradcheck=f"{DROP_IN}gradcheck[open_clip.ClipLoss]",
        compiles=f"{DROP_IN}compiles_without_a_graph_break[open_clip.ClipLoss]",
    ),
    "compat.open_clip.ClipLoss, several ranks": PATHS["distributed.clip_loss"]._replace(
        reference=ORIGINALS + "open_clip_on_several_ranks",
        gradcheck=ORIGINALS + "open_clip_with_gathered_gradients_is_one_process",
    ),
    "compat.open_clip.SigLipLoss": PATHS["sigmoid_loss"]._replace(
        reference="fedkernels/compat/test_open_clip.py::test_scale_and_bias_are_numbers_or_tensors",
        gradcheck=f"{DROP_IN}gradcheck[open_clip.SigLipLoss]",
        compiles=f"{DROP_IN}compiles_without_a_graph_break[open_clip.SigLipLoss]",
    ),
    "compat.open_clip.SigLipLoss, several ranks": PATHS["distributed.sigmoid_loss"]._replace(
        reference="fedkernels/compat/test_open_clip.py::test_siglip_on_several_ranks_is_that_of_one_process",
        gradcheck="fedkernels/compat/test_open_clip.py::test_siglip_on_several_ranks_is_that_of_one_process",
    ),
    "compat.lightly.NTXentLoss": PATHS["nt_xent"]._replace(
        reference=ORIGINALS + "lightly_in_one_process",
        gradcheck=f"{DROP_IN}gradcheck[lightly.NTXentLoss]",
        compiles=f"{DROP_IN}compiles_without_a_graph_break[lightly.NTXentLoss]",
    ),
    "compat.lightly.NTXentLoss, several ranks": PATHS["distributed.nt_xent"]._replace(
        reference=ORIGINALS + "lightly_on_several_ranks",
    ),
    "compat.lightly.NTXentLoss, memory bank": PATHS["info_nce, labels"]._replace(
        reference="fedkernels/compat/test_lightly.py::test_the_loss_is_that_of_the_positive_and_the_bank",
        gradcheck="fedkernels/compat/test_lightly.py::test_the_loss_is_that_of_the_positive_and_the_bank",
        compiles=Because("which rows of the bank are replaced depends on data"),
    ),
    "compat.pytorch_metric_learning.NTXentLoss": PATHS["info_nce, labels"]._replace(
        reference=ORIGINALS + "pytorch_metric_learning",
        gradcheck=f"{DROP_IN}gradcheck[pytorch_metric_learning.NTXentLoss]",
        compiles=Because("it counts the classes, whose number depends on data; test_compiled_in_several_graphs"),
    ),
    "compat.pytorch_metric_learning.SupConLoss": PATHS["supervised_contrastive_loss, an odd number of rows"]._replace(
        reference=ORIGINALS + "pytorch_metric_learning",
        gradcheck=f"{DROP_IN}gradcheck[pytorch_metric_learning.SupConLoss]",
        compiles=Because("it counts the classes, whose number depends on data; test_compiled_in_several_graphs"),
    ),
    "compat.sentence_transformers.MultipleNegativesRankingLoss": PATHS["info_nce"]._replace(
        reference=ORIGINALS + "sentence_transformers",
        gradcheck=f"{DROP_IN}gradcheck[sentence_transformers.MultipleNegativesRankingLoss]",
        compiles=f"{DROP_IN}compiles_without_a_graph_break[sentence_transformers.MultipleNegativesRankingLoss]",
    ),
    "compat.sentence_transformers.MultipleNegativesSymmetricRankingLoss": PATHS["clip_loss"]._replace(
        reference=ORIGINALS + "sentence_transformers",
        gradcheck=f"{DROP_IN}gradcheck[sentence_transformers.MultipleNegativesSymmetricRankingLoss]",
        compiles=f"{DROP_IN}compiles_without_a_graph_break[sentence_transformers.MultipleNegativesSymmetricRankingLoss]",
    ),
    "compat.sentence_transformers.CachedMultipleNegativesRankingLoss": PATHS["info_nce"]._replace(
        reference=ORIGINALS + "sentence_transformers_cached",
        gradcheck=DROP_IN + "the_cached_forms_gradient_is_that_of_the_plain_one",
        compiles=Because("its second pass is a hook that runs the model again with stored random states"),
    ),
    "compat.torch_cka.CKA": Path(
        "fedkernels/compat/test_torch_cka.py::test_values_are_the_originals",
        NO_GRADIENT,
        NO_OPERATOR,
        Because("it hooks two networks in a loop over their data"),
        LIKE_ANY_TENSOR,
    ),
    "compat.torchjd.MGDAWeighting": PATHS["client_weights"]._replace(
        reference=ORIGINALS + "torchjd", compiles=DROP_IN + "mgda_compiles_without_a_graph_break"
    ),
}
PATHS |= {
    "compat.pot.mm_unbalanced2": PATHS["compat.pot.mm_unbalanced"],
    "compat.torchjd_aggregators.MinimumNorm": PATHS["compat.torchjd_aggregators.MinimumNormWeighting"],
    "compat.sentence_transformers.CachedMultipleNegativesSymmetricRankingLoss": PATHS[
        "compat.sentence_transformers.CachedMultipleNegativesRankingLoss"
    ],
    "compat.torchjd.MGDA": PATHS["compat.torchjd.MGDAWeighting"],
}

# What is public and computes nothing.
RECORDS = {
    "Comparison": Because("what compare returns"),
    "TransportInfo": Because("what unbalanced_ot_plan returns beside the plan"),
    "ViewKey": Because("an argument of two_views"),
    "ViewOptions": Because("an argument of two_views"),
    "ViewParameters": Because("what view_parameters returns"),
    "compat.lightly.MemoryBankModule": Because("the buffers of NTXentLoss"),
    "build_info": Because("it tells what is compiled"),
    "self_test": Because("it tests the others"),
}

WITHIN_CKA = Because("a part of linear_cka, which torch.compile takes as one operator")
BY_WEIGHTS = "fedkernels/test_compiled_operators.py::test_gradients_by_weights"
# The opcheck of every operator that is registered.
OPERATORS = {name: f"{OPCHECK}[{name}]" for name in native.COMPILED} | {
    **{f"{name}_gradients": f"{BY_WEIGHTS}[{name}_gradients]" for name in ("info_nce", "nt_xent")},
    "similarity_logsumexp_gradients": f"{BY_WEIGHTS}[similarity_logsumexp_gradients]",
    "client_weights_solve": CLIENT_WEIGHTS + "the_operator_of_compiled_graphs_keeps_to_torchs_rules",
    "unbalanced_ot_reference": STIFF + "the_operators_keep_to_torchs_rules_with_other_methods",
    "distributed_losses": DISTRIBUTED + "opcheck",
    "distributed_gradients": DISTRIBUTED + "opcheck_of_the_gradients",
    **dict.fromkeys(native.PARTS, WITHIN_CKA),
}


def problem(cell: str) -> str:
    """Why this is neither a test nor a reason, or ""."""
    if isinstance(cell, Because):
        return "" if len(cell) > 10 else "a reason is missing"
    found = re.fullmatch(r"(\S+)\.py::(test_\w+)(?:\[(.+)\])?", cell)
    if found is None:
        return f"{cell!r} is no test"
    file, name, case = found.groups()
    if not (ROOT / "tests" / f"{file}.py").is_file():
        return f"tests/{file}.py does not exist"
    function = getattr(importlib.import_module(f"tests.{file.replace('/', '.')}"), name, None)
    if function is None:
        return f"tests/{file}.py has no {name}"
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    if case is not None and case not in {str(value) for mark in marks for value in mark.args[1]}:
        return f"{name} has no case {case!r}"
    return ""


def public_names() -> set[str]:
    names = set(fedkernels.__all__)
    names |= {f"distributed.{name}" for name in distributed.__all__}
    modules = [PACKAGE / "nn.py"]
    modules += [path for path in (PACKAGE / "compat").glob("[!_]*.py") if path.stem != "only_default"]
    for path in modules:
        prefix = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                names.add(f"{prefix}.{node.name}")
    return names


def test_everything_public_has_a_row():
    assert public_names() == {name.partition(",")[0] for name in PATHS} | set(RECORDS)


@pytest.mark.parametrize("name", PATHS)
def test_each_column_names_a_test_or_a_reason(name):
    problems = {column: problem(cell) for column, cell in PATHS[name]._asdict().items()}
    assert not any(problems.values()), problems


def test_each_reason_why_a_name_has_no_path_is_given():
    assert not any(map(problem, RECORDS.values()))


@pytest.mark.skipif(native.module is None, reason="the compiled operators are not registered")
def test_each_registered_operator_is_checked():
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "fedkernels::" in name}
    assert {name.partition(".")[0] for name in registered} == set(OPERATORS)
    problems = {name: problem(cell) for name, cell in OPERATORS.items()}
    assert not any(problems.values()), problems


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (Because(""), "a reason is missing"),
        ("no gradient", "'no gradient' is no test"),
        ("fedkernels/test_nothing.py::test_gradcheck", "tests/fedkernels/test_nothing.py does not exist"),
        ("fedkernels/test_info_nce.py::test_nothing", "tests/fedkernels/test_info_nce.py has no test_nothing"),
        (f"{OPCHECK}[nothing]", "test_opcheck has no case 'nothing'"),
    ],
)
def test_what_does_not_exist_is_told(cell, message):
    assert problem(cell) == message
