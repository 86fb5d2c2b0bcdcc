"""The surface of fedkernels and its independence from fedssl."""

import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
import torch

import fedkernels
from fedkernels import compat, distributed, nn

PUBLIC = ["fedkernels", "fedkernels.nn", "fedkernels.distributed"]
COMPAT = [
    f"fedkernels.compat.{one.name}"
    for one in pkgutil.iter_modules(compat.__path__)
    if one.name != "only_default" and one.name[0] != "_"
]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_readme_lists_what_is_public(module):
    readme = (Path(fedkernels.__file__).parent / "README.md").read_text()
    (names,) = re.findall(rf"^\| `{module}` \| (.+) \|$", readme, re.MULTILINE)
    public = import_module(module)
    assert names.split(", ") == [f"`{name}`" for name in sorted(public.__all__)]
    assert all(getattr(public, name).__doc__ for name in public.__all__)


@pytest.mark.parametrize("module", ["fedkernels.nn", *COMPAT])
def test_all_names_what_a_module_defines(module):
    """Else `import *` would replace the user's names by those that the module imports."""
    if module.endswith("torchjd_aggregators"):
        pytest.importorskip("torchjd")
    module = import_module(module)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    assert sorted(module.__all__) == sorted(name for name in own if name[0] != "_")


@pytest.mark.parametrize("module", [*PUBLIC, "fedssl"])
def test_a_star_leaves_the_names_of_torch(module):
    if module == "fedssl":
        pytest.importorskip("pydantic", reason="fedkernels is tested alone here: fedssl needs pydantic")
    names = {"nn": torch.nn, "F": torch.nn.functional, "distributed": torch.distributed, "__version__": "the user's"}
    before = dict(names)
    exec(f"from {module} import *", names)
    assert {name: names[name] for name in before} == before


# loss: its module, and what it does not have on several ranks
LOSSES = {
    "info_nce": ("InfoNCE", {"positives", "labels", "excluded", "recompute"}),
    "nt_xent": ("NTXent", set()),
    "clip_loss": ("CLIPLoss", set()),
    "sigmoid_loss": ("SigmoidLoss", set()),
    "supervised_contrastive_loss": ("SupervisedContrastiveLoss", set()),
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
    on_ranks = options_of(getattr(distributed, loss))
    assert on_ranks[:-2] == [one for one in of_function if one[0] not in alone]
    assert [name for name, *_ in on_ranks[-2:]] == ["method", "group"]
    assert on_ranks[-2][1:] == ("gather", Literal["gather", "ring"])


def test_import_is_alone():
    """Neither fedssl nor torch's compiler comes along."""
    code = "import sys, fedkernels; fedkernels.info_nce; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"fedssl", "torch._inductor"} & set(result.stdout.split())


# A torch that was built without distributed has a module of that name with little in it.
WITHOUT_DISTRIBUTED = """
import sys, types, torch, pytest
few = {"is_available": lambda: False, "ProcessGroup": object}
torch.distributed = sys.modules["torch.distributed"] = types.SimpleNamespace(**few)
sys.modules["torch.distributed.distributed_c10d"] = None
from fedkernels.compat import lightly, open_clip, sentence_transformers
rows, model = torch.eye(3), torch.nn.Identity()
assert lightly.NTXentLoss()(rows, rows) > 0 < open_clip.ClipLoss()(rows, rows, 1.0)
ranking = sentence_transformers.MultipleNegativesRankingLoss(model, scale=1.0, gather_across_devices=True)
assert ranking.compute_loss_from_embeddings([rows, rows]) > 0
for error, told, call in (
    (ValueError, "gather_distributed must be False", lambda: lightly.NTXentLoss(gather_distributed=True)),
    (ValueError, "rank and world_size must be those", lambda: open_clip.ClipLoss(world_size=2)(rows, rows, 1.0)),
    (RuntimeError, "must be initialised", lambda: lightly.distributed.info_nce(rows, rows, 1.0)),
):
    with pytest.raises(error, match=told):
        call()
"""


def test_a_torch_without_distributed_has_the_losses_of_one_process():
    subprocess.run([sys.executable, "-c", WITHOUT_DISTRIBUTED], check=True)


@pytest.mark.parametrize(
    ("former", "new"),
    [("drop_in", "compat"), ("pot", "compat.pot"), ("torchjd", "compat.torchjd_aggregators")],
)
def test_the_former_import_paths_give_the_same_objects_and_warn(former, new, monkeypatch):
    if former == "torchjd":
        pytest.importorskip("torchjd")
    monkeypatch.delitem(sys.modules, f"fedkernels.{former}", raising=False)
    with pytest.warns(
        DeprecationWarning, match=f"fedkernels.{former} is deprecated: import from fedkernels.{new}$"
    ) as seen:
        exec(f"import fedkernels.{former}")
    assert [one.filename for one in seen] == ["<string>"]  # the line that imports it
    old, module = sys.modules[f"fedkernels.{former}"], import_module(f"fedkernels.{new}")
    for name in ["lightly", "open_clip", "torchjd"] if former == "drop_in" else module.__all__:
        assert getattr(old, name) is getattr(module, name)
    from fedkernels.drop_in.lightly import NTXentLoss

    assert NTXentLoss is compat.lightly.NTXentLoss
