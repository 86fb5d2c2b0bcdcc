"""The papers' figures in the shipped tables, against a sample copied by hand from the papers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedssl.recipe.overrides import shipped_names
from fedssl.tables.table import load_table

ON = "downstream_{}_fine_tune_accuracy"
CALTECH = "downstream_caltech101_fine_tune_per_class_accuracy"

# (table, scenario, row, metric, the figure as printed)
PRINTED = [
    # Hetero-SSFL: Tables 1, 4, 5 and 6
    ("hetero_ssfl_table1", "CIFAR-10", "FedBYOL", "linear", "78.1 ± 1.1"),
    ("hetero_ssfl_table1", "CIFAR-10", "Hetero-SSFL", "linear", "90.29 ± 0.3"),
    ("hetero_ssfl_table1", "CIFAR-100", "Supervised FedAvg", "linear", "44.29 ± 1.34"),
    ("hetero_ssfl_table1", "CIFAR-100", "Central BYOL (IID upper bound)", "linear", "74.2 ± 0.67"),
    ("hetero_ssfl_table1", "CIFAR-10", "Local SSL", "linear@resnet18", "71.9"),
    ("hetero_ssfl_table1", "CIFAR-10", "Hetero-SSFL", "linear@resnet34", "93.7"),
    ("hetero_ssfl_table1", "CIFAR-100", "FedEMA", "semi_supervised_0.01", "23.11 ± 0.65"),
    ("hetero_ssfl_table1", "CIFAR-10", "FedU", "semi_supervised_0.1", "86.8 ± 0.5"),
    ("hetero_ssfl_tiny_imagenet", "", "FedSimSiam", "linear", "29.1 ± 1.2"),
    ("hetero_ssfl_tiny_imagenet", "", "FedU", "linear", "58.23 ± 2.3"),
    # Tables 2 and 3
    ("hetero_ssfl_table2", "CIFAR-10", "FedEMA", "linear", "85.9 ± 0.3"),
    ("hetero_ssfl_table2", "CIFAR-100", "FedU", "linear", "20.4 ± 0.91"),
    ("hetero_ssfl_table3", "20 clients (5)", "Hetero-SSFL", "linear", "57.5 ± 0.9"),
    ("hetero_ssfl_table3", "100 clients (10)", "FedU", "linear", "41.1 ± 2.3"),
    # FedU2: Tables 1 and 2
    ("fedu2_table1", "CIFAR-10, cross-device (K = 100)", "FedU2-Simsiam", "linear", "68.50"),
    ("fedu2_table1", "CIFAR-100, cross-silo (K = 10)", "Orchestra", "semi_supervised_0.1", "48.85"),
    ("fedu2_table1_small", "cross-silo (K = 10)", "FedX-SimCLR", "semi_supervised_0.01", "65.03"),
    ("fedu2_table2", "CIFAR-10, alpha 0.5", "FedX-BYOL", "knn", "40.96"),
    ("fedu2_table2", "CIFAR-100, alpha 5", "FedU2 without EUA", "knn", "54.61"),
    # LW-FedSSL: Tables 2, 3 and 6
    ("lw_fedssl_accuracy", "", "Scratch", CALTECH, "22.10"),
    ("lw_fedssl_accuracy", "", "SimCLR (Centralized)", ON.format("cifar100"), "65.64"),
    ("lw_fedssl_accuracy", "", "FedEMA", ON.format("cifar10"), "81.35"),
    ("lw_fedssl_accuracy", "", "FedCA", ON.format("tinyimagenet"), "43.04"),
    ("lw_fedssl_accuracy", "", "Prog-FedSSL, 6 layers a stage", ON.format("cifar100"), "66.78"),
    ("lw_fedssl_accuracy", "", "LW-FedSSL + PA", CALTECH, "44.31"),
    # Tables 4, 7 and 8
    ("lw_fedssl_resnet18", "", "Prog-FedSSL", CALTECH, "63.59"),
    ("lw_fedssl_participation", "50 of 100 clients a round", "LW-FedSSL", ON.format("tinyimagenet"), "41.17"),
    ("lw_fedssl_participation", "25 % of 100 clients drop out", "FedMoCoV3", ON.format("cifar10"), "72.38"),
    # Tables 9, 11, 12 and 13
    ("lw_fedssl_medmnist", "DermaMNIST", "LW-FedSSL", "fine_tune_precision", "40.03"),
    ("lw_fedssl_medmnist", "BloodMNIST at 224 pixels", "Prog-FedSSL", "fine_tune_f1", "95.13"),
    ("lw_fedssl_medmnist", "BloodMNIST, batches of 64", "FedMoCoV3", "fine_tune_recall", "91.56"),
    ("lw_fedssl_medmnist", "BloodMNIST, beta = 0.5", "FedMoCoV3", "fine_tune_per_class_accuracy", "92.14"),
    # resources: Tables 2, 4, 6, 10 and 11
    ("lw_fedssl_resources", "", "FedEMA", "memory", "8.96"),
    ("lw_fedssl_resources", "", "LW-FedSSL, ResNet-18", "traffic", "3.41"),
    ("lw_fedssl_resources", "", "Prog-FedSSL + DD", "flops", "233"),
    ("lw_fedssl_resources_blood", "", "LW-FedSSL", "memory", "3.10"),
    ("lw_fedssl_resources_blood", "", "FedMoCoV3 at 128 pixels", "flops", "2717"),
]


@pytest.mark.parametrize("name", sorted({table for table, *_ in PRINTED}))
def test_the_papers_figures_stand_in_the_table(name):
    papers = {scenario.label: scenario.paper for scenario in load_table(name).all_scenarios}
    for table, scenario, row, metric, figure in PRINTED:
        assert table != name or papers[scenario][row][metric] == figure, (scenario, row, metric)


@pytest.mark.parametrize("name", [f"hetero_ssfl_table{k}" for k in (1, 2, 3)] + ["fedu2_table1", "fedu2_table2"])
def test_every_row_of_a_papers_table_has_a_figure_in_every_scenario(name):
    loaded = load_table(name)
    for scenario in loaded.all_scenarios:
        without = {row.label for row in loaded.rows} - set(scenario.paper)
        assert without <= {"Local SSL"}


def test_the_page_of_what_reproduces_what_names_every_table_that_ships():
    page = (Path(__file__).parents[3] / "docs" / "what_reproduces_what.md").read_text(encoding="utf-8")
    named = {name for code in re.findall("`([^`]+)`", page) for name in code.split()}
    assert set(shipped_names("table")) <= named
