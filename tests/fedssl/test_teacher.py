"""Distillation: its losses and gradients by definition, what a run records of its teacher, and what is refused."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

from fedssl.engines import in_process
from fedssl.errors import UserError
from fedssl.federation import build_federation, federation_of_run
from fedssl.models import weights
from fedssl.models.encoders import build_encoder
from fedssl.models.weights import digest, frozen_encoder
from fedssl.objectives.base import Step
from fedssl.recipe.reading import load_recipe, load_stored_recipe
from fedssl.recipe.rules import check_parts
from fedssl.reports.cost import estimate
from fedssl.run_folder.directory import RunDirectory
from fedssl.teacher import _loaded, cosines, similarity_loss
from fedssl.training import STEP_COSTS
from tests.fedssl.conftest import AVERAGED, tiny_values
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.small_models import local_round, scalar_model

PART = {"name": "distillation"}
VIEW = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def similarities(student, teacher, temperature=0.5):
    """By the definition, of unit rows, with weights 0 for an image itself."""
    rows = [x / x.square().sum(1, keepdim=True).sqrt() for x in (student, teacher)]
    weights = [torch.exp((x[:, None] * x).sum(2) / temperature) * (1 - torch.eye(len(x))) for x in rows]
    s, t = (w / w.sum(1, keepdim=True) for w in weights)
    return float((t.xlogy(t) - t.xlogy(s)).sum()) / len(s)


def test_similarities_equal_the_definition_and_their_gradients_finite_differences():
    torch.manual_seed(0)
    student, teacher = (torch.randn(5, d, dtype=torch.float64) for d in (3, 4))

    def loss(one: torch.Tensor, other: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
        return similarity_loss(cosines(one), cosines(other), temperature)

    assert float(loss(student, teacher)) == pytest.approx(similarities(student, teacher), rel=1e-12)
    assert float(loss(3 * teacher, teacher, 0.1)) == pytest.approx(0, abs=1e-12)
    assert float(loss(student[:1], teacher[:1])) == 0
    assert torch.autograd.gradcheck(lambda x: loss(x, teacher), student.requires_grad_())


@pytest.mark.parametrize(("loss", "layers"), [("features", 1), ("features", 2), ("similarities", 1)])
def test_a_step_compares_the_networks_on_one_view_and_the_teacher_is_in_no_state(noisy, teacher, loss, layers):
    options = {"teacher": str(teacher), "temperature": 0.5}
    part = PART | options | {"loss": loss, "projector_layers": layers}
    federation = build_federation(noisy(**AVERAGED, objective=part, regularizers=[PART | options | {"weight": 3}]))
    model = federation.new_model(None).eval()
    step = federation.method.objective.step(model, (VIEW,), torch.zeros(6))
    outputs = model.represent(VIEW).detach().double()
    target = frozen_encoder(str(teacher), (1, 8, 8), "teacher")(VIEW).double()
    expected = similarities(outputs, target)
    if loss == "features":
        expected = float(1 - ((outputs * target).sum(1) / outputs.norm(dim=1) / target.norm(dim=1)).mean())
    assert step.loss.item() == pytest.approx(expected, rel=1e-4)
    step.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert federation.method.initial_state().tensors.keys() == model.state_dict().keys()
    assert set(model.online) == {"encoder", "projector"} - ({"projector"} if loss == "similarities" else set())
    # beside another objective, on the first view of the online network
    local, other = local_round(scalar_model()), torch.zeros_like(VIEW)
    step = Step(torch.tensor(0.0), (torch.randn(6, 5), torch.randn(6, 5)), views=(other, VIEW, other), first_view=1)
    expected = similarities(step.representations[0].double(), target)
    assert float(federation.method.regularizers[0].start_round(local)(step)) == pytest.approx(3 * expected, rel=1e-4)
    assert local.logged()["distillation_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_run_records_its_teacher_and_goes_on_with_no_other_but_is_evaluated_without_any(noisy, teacher, tmp_path):
    folder = Path(shutil.copytree(teacher, tmp_path / "teacher"))
    recipe = noisy(**AVERAGED, objective=PART | {"teacher": str(folder)}, training={"local_epochs": 3, "batch_size": 8})
    run = in_process.run(recipe, tmp_path / "run").path
    stored = load_stored_recipe(RunDirectory.open(run), trust=False)
    assert stored.objective.teacher_digest == digest(load_file(folder / "model.safetensors"))
    assert stored.objective.teacher_features == 192
    again = train_rounds(build_federation(stored), 2)
    state = RunDirectory.open(run).server_state().tensors
    assert all(torch.equal(state[name], tensor) for name, tensor in again.server.tensors.items())
    assert again.replies[2][0].metrics["loss"] < again.replies[1][0].metrics["loss"]
    others = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(others, folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"distillation\.teacher: .*other weights than those recorded in teacher_digest"
    ):
        build_federation(stored)
    shutil.rmtree(folder)
    assert "projector" in federation_of_run(RunDirectory.open(run)).new_model(None).online


def test_wrong_teachers_are_refused_by_name(noisy, teacher, tmp_path):
    small = Path(shutil.copytree(teacher, tmp_path / "small"))
    (small / "config.json").write_text('{"fedssl": {"architecture": "small_convnet_wide", "image_shape": [1, 4, 4]}}')
    for wrong, says in {
        str(small): r"small is an encoder of images .* \[1, 4, 4\], got \[1, 8, 8\]: set data.image_size",
        str(tmp_path / "none"): r"there is no folder .*none: expected a folder of fedssl export",
        "timm:resnet1": r"timm has no model 'resnet1'",
        str(teacher / "model.safetensors"): r"does not tell its architecture: expected a folder",
    }.items():
        for part in ({"objective": PART | {"teacher": wrong}}, {"regularizers": [PART | {"teacher": wrong}]}):
            with pytest.raises(UserError, match=rf"^distillation\.teacher: .*{says}"):
                build_federation(noisy(**AVERAGED | part))
    with pytest.raises(UserError, match="which engine flower's sites lack: use timm:NAME"):
        check_parts(noisy(**AVERAGED, objective=PART | {"teacher": str(teacher)}, engine="flower"))
    check_parts(noisy(**AVERAGED, objective=PART | {"teacher": "timm:resnet18"}, engine="flower"))


def test_a_teacher_of_timm_keeps_its_own_stem_and_a_path_starts_at_the_recipe(monkeypatch, tmp_path):
    given = timm.create_model("resnet10t", num_classes=0).state_dict()
    monkeypatch.setattr(weights, "_from_timm", lambda name: given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)  # a step that reads it would go on with other numbers
    network = frozen_encoder("timm:resnet10t", (3, 32, 32), "teacher")
    assert all(torch.equal(tensor, given[name]) for name, tensor in network.state_dict().items())
    assert not any(p.requires_grad for p in network.parameters())
    assert not network.training
    values = tiny_values(**AVERAGED, objective=PART | {"teacher": "encoder"})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    assert load_recipe(tmp_path / "mine.yaml").objective.teacher == str(tmp_path / "encoder")


def test_loading_the_teacher_is_no_operation_of_a_step(noisy, tmp_path):
    """A step costs the same in a process that first reads a teacher, and tries images on it, and in one that has it."""
    save_file(build_encoder("small_vit", 1, 8).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "small_vit"}')
    recipe = noisy(**AVERAGED, objective=PART | {"teacher": str(tmp_path)})
    found = []
    for clear in (_loaded.cache_clear, STEP_COSTS.clear):
        STEP_COSTS.clear()
        clear()
        found.append(sum(cost.flops[0] for cost in estimate(build_federation(recipe)) if cost.flops))
    assert found[0] == found[1] > 0
