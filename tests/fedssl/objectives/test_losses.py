"""The objectives' losses by hand and by definition, their heads, what target networks follow, Orchestra's memory."""

import math

import pytest
import torch
from torch import nn

from fedkernels import ViewKey
from fedssl.augmentations.multi_crop import MultiCrop
from fedssl.augmentations.random_views import RandomViews
from fedssl.data.pixels import normalize
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.models.model import Model
from fedssl.objectives.barlow_twins import BarlowTwins
from fedssl.objectives.base import Objective
from fedssl.objectives.byol import BYOL
from fedssl.objectives.dino import DINO, Prototypes, distillation_loss
from fedssl.objectives.fedx import FedX
from fedssl.objectives.lejepa import LeJEPA
from fedssl.objectives.moco_v3 import MoCoV3
from fedssl.objectives.orchestra import Orchestra, cluster_loss, turn
from fedssl.objectives.simclr import SimCLR
from fedssl.objectives.simsiam import SimSiam
from fedssl.objectives.supervised import Supervised
from fedssl.objectives.vicreg import VICReg
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.small_models import E1, E2, Flat, Scale

LABELS = torch.tensor([0, 1])
#: Two views of two images of two pixels. Once normalised the first view is e1, e2 and the second e2, e2.
ONE, TWO = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 4.0], [0.0, 2.0]])
COSINE = 1 / math.sqrt(2)  # of d = (e1 + e2) / sqrt(2) with e1 and with e2
VIEWS = (ONE.view(2, 1, 1, 2), TWO.view(2, 1, 1, 2))


def plain_model(part: Objective) -> Model:
    """Its networks hand on what they get; the target projector turns e1 to (e1 + e2) / sqrt(2)."""
    model = part.build(Flat(), 2)
    for name in model.online:
        model.online[name] = nn.Flatten()
    if model.target:
        model.target["projector"] = Scale([[1.0, 0.0], [1.0, 1.0]]).requires_grad_(False)
    return model


def nt_xent_by_hand(s: float) -> float:
    """Over e1, e2, e2, e2: the first row's three others are at cosine 0, the third's positive too and two others at 1;
    the second's and the fourth's positive is at 1, one of their others at 1 and one at 0."""
    return (math.log(3) + 3 * math.log(2 * math.exp(s) + 1) - 2 * s) / 4


def info_nce_by_hand(s: float) -> float:
    """The keys of the first view are d = (e1 + e2) / sqrt(2) and e2, those of the second e2, e2. (e1, e2) against the
    second's is log 2 in each row. In (e2, e2) against the first's the cosines are c = 1 / sqrt(2) and 1 in each row, of
    which the first is the first row's positive and the second the second's."""
    return math.log(2) + math.log(math.exp(COSINE * s) + math.exp(s)) - s * (1 + COSINE) / 2


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        # (e1, e2) against e2, e2 has the cosines 0 and 1, a loss of 1; (e2, e2) against d, e2 has c and 1, so 1 - c
        (BYOL(), (1 + 1 - COSINE) / 2),
        (BYOL(symmetric=False), 1.0),
        (SimSiam(), -0.5),  # the cosines of the two pairs are 0 and 1
        (SimCLR(), nt_xent_by_hand(1 / 0.5)),
        (FedX(), nt_xent_by_hand(1 / 0.1)),
        (MoCoV3(), info_nce_by_hand(1 / 0.05)),
        (MoCoV3(temperature=0.5), info_nce_by_hand(2.0)),
        (Supervised(), (math.log(math.exp(3) + 1) - 3 + math.log(math.e + 1) - 1) / 2),  # pixels as logits
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_loss_by_hand(part, expected):
    step = part.step(plain_model(part), VIEWS[: part.views], LABELS)
    assert float(step.loss) == pytest.approx(expected, rel=1e-6)
    assert len(step.representations) == part.online_views
    for outputs in (step.representations, step.projections, step.predictions):
        assert all(torch.equal(output, view) for output, view in zip(outputs, (ONE, TWO), strict=False))


@pytest.mark.parametrize(
    ("part", "sizes"),
    [
        (BYOL(), {"projector": [2, 4096, 2048], "predictor": [2048, 4096, 2048]}),
        (FedX(), {"projector": [2, 256, 256], "predictor": [256, 256, 256]}),
        (MoCoV3(), {"projector": [2, 512, 512, 256], "predictor": [256, 512, 256]}),
        (SimCLR(), {"projector": [2, 2048, 128]}),
        (SimSiam(), {"projector": [2, 2048, 2048, 2048], "predictor": [2048, 512, 2048]}),
        (DINO(), {"projector": [2, 2048, 2048, 256], "prototypes": [256, 4096]}),
        (VICReg(), {"projector": [2, 2048, 2048, 2048]}),
        (LeJEPA(), {"projector": [2, 2048, 2048, 64]}),
        (BarlowTwins(), {"projector": [2, 2048, 2048, 2048]}),
    ],
)
def test_the_heads_have_the_papers_sizes(part, sizes):
    heads = {name: network for name, network in part.build(Flat(), 2).online.items() if name != "encoder"}
    layers = {name: [one for one in head.modules() if isinstance(one, nn.Linear)] for name, head in heads.items()}
    assert {name: [of[0].in_features, *(one.out_features for one in of)] for name, of in layers.items()} == sizes
    ends = {name: list(head.modules())[-1] for name, head in heads.items()}
    normed = {name for name, end in ends.items() if isinstance(end, nn.BatchNorm1d) and not end.affine}
    assert normed == {"moco_v3": {"projector", "predictor"}, "simsiam": {"projector"}}.get(part.name, set())


@pytest.mark.parametrize("kind", [BYOL, DINO, MoCoV3])
def test_no_gradient_reaches_the_target_network_which_follows_by_its_momentum(kind):
    torch.manual_seed(0)
    part = kind(hidden_features=4, output_features=3, target_momentum=0.75)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    encoder.num_features = 2
    model = part.build(encoder, 2)
    assert set(model.target) == set(model.online) - {"predictor"}
    before = {name: p.clone() for name, p in model.target.named_parameters()}
    part.step(model, (torch.randn(4, 1, 1, 2), torch.randn(4, 1, 1, 2)), LABELS).loss.backward()
    assert all(p.grad is None for p in model.target.parameters())
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.online["encoder"].parameters())
    with torch.no_grad():
        for parameter in model.online.parameters():
            parameter += 1.0
    part.after_step(model)
    for name, parameter in model.target.named_parameters():
        torch.testing.assert_close(parameter, before[name] + 0.25)
        assert not parameter.requires_grad


def test_dinos_teacher_sees_the_first_two_views_and_their_outputs_move_the_centre():
    part = DINO(prototypes=2, local_views=1, centre_momentum=0.75, teacher_temperature=0.5, student_temperature=2.0)
    model = plain_model(part)
    model.target["prototypes"] = nn.Flatten()
    model.centre.copy_(torch.tensor([0.5, -1.0]))
    small = torch.tensor([[1.0, -1.0], [2.0, 0.5]])
    step = part.step(model, (*VIEWS, small.view(2, 1, 1, 2)), LABELS)
    teacher = torch.stack([ONE, TWO]) @ model.target["projector"].weight.T
    expected = distillation_loss(torch.stack([ONE, TWO, small]), teacher, torch.tensor([0.5, -1.0]), 2.0, 0.5)
    assert float(step.loss) == pytest.approx(float(expected))
    torch.testing.assert_close(model.centre, 0.75 * torch.tensor([0.5, -1.0]) + 0.25 * teacher.mean(dim=(0, 1)))
    assert torch.equal(torch.stack(step.representations), torch.stack([ONE, TWO]))


def test_dinos_prototypes_give_cosines_and_its_head_may_have_batch_norm():
    rows, prototypes = torch.tensor([[3.0, 4.0]]), Prototypes(2, 3, bias=False)
    with torch.no_grad():
        prototypes.weight.copy_(torch.tensor([[6.0, 8.0], [0.0, -2.0], [4.0, -3.0]]))
    torch.testing.assert_close(prototypes(rows), torch.tensor([[1.0, -0.8, 0.0]]))
    names = [type(layer).__name__ for layer in DINO(batch_norm=True).build(Flat(), 2).online["projector"]]
    assert names == ["Linear", "BatchNorm1d", "GELU", "Linear", "BatchNorm1d", "GELU", "Linear"]


@pytest.mark.parametrize("stop", [True, False])
def test_simsiam_without_stop_gradient_moves_the_targets_too(stop):
    """With predictions cut off from the graph, only the targets can carry a gradient."""
    part = SimSiam(stop_gradient=stop)
    model = plain_model(part)
    model.online["predictor"].register_forward_hook(lambda module, inputs, output: output.detach())
    loss = part.step(model, tuple(view.clone().requires_grad_() for view in VIEWS), LABELS).loss
    assert loss.requires_grad is not stop


def test_supervised_training_is_cropped_a_little_and_mirrored_as_the_recipe_says(noisy):
    hard = {"flip": 0.3, "crop_scale": [0.1, 0.2], "solarize": 0.5}
    mild = build_federation(noisy(**AVERAGED | {"augmentation": hard, "objective": "supervised"})).method.augmentation
    assert (mild.crop_scale, mild.crop_ratio, mild.flip) == ((0.64, 1.0), (1.0, 1.0), 0.3)
    assert {getattr(mild, name) for name in ("jitter_probability", "grayscale", "blur", "solarize")} == {0}
    constant = torch.full((30, 1, 8, 8), 77, dtype=torch.uint8)  # no colour changes
    views, _ = mild.views(constant, torch.arange(30), ViewKey(0))
    torch.testing.assert_close(views, normalize(constant))
    for objective, kept in ((Supervised(), MultiCrop(**hard)), (BYOL(), RandomViews(**hard))):
        assert objective.training_augmentation(kept) is kept


# Beside their definitions, written with a loop for each sum

ROWS, FEATURES = 7, 4
CENTRE = torch.tensor([0.02, -0.01, 0.03, 0.0], dtype=torch.float64)


def step_loss(part):
    """The loss of a step whose projections are the two views."""
    model = Model({"encoder": nn.Identity(), "projector": nn.Identity()})
    return lambda *views: part.step(model, views, torch.zeros(ROWS)).loss


def vicreg(*views):
    total = 25 * ((views[0] - views[1]) ** 2).sum() / (ROWS * FEATURES)
    for covariance in (torch.cov(view.T) for view in views):
        for j in range(FEATURES):
            total = total + 25 / 2 * (1 - (covariance[j, j] + 1e-4).sqrt()).clamp(min=0) / FEATURES
            total = total + sum(covariance[j, k] ** 2 for k in range(FEATURES) if k != j) / FEATURES
    return total


def barlow_twins(*views):
    a, b = ((z - z.mean(dim=0)) / (((z - z.mean(dim=0)) ** 2).mean(dim=0) + 1e-5).sqrt() for z in views)
    total = 0
    for j in range(FEATURES):
        for k in range(FEATURES):
            correlation = sum(a[i, j] * b[i, k] for i in range(ROWS)) / ROWS
            total = total + ((1 - correlation) ** 2 if j == k else 5e-3 * correlation**2)
    return total


def dino(*views):
    """Of three views of the student's, and the teacher's of the first two."""
    total = 0
    for t in range(2):
        target = torch.softmax((views[3 + t] - CENTRE.to(views[0])) * 32, dim=1)
        for s in {0, 1, 2} - {t}:
            predicted = torch.softmax(views[s] * 10, dim=1)
            total = total - sum((target[i] * predicted[i].log()).sum() for i in range(ROWS))
    return total / (ROWS * 4)


def our_dino(*views):
    return distillation_loss(torch.stack(views[:3]), torch.stack(views[3:]), CENTRE.to(views[0]), 0.1, 1 / 32)


@pytest.mark.parametrize(
    ("ours", "definition", "count"),  # of tensors [ROWS, FEATURES]
    [
        pytest.param(step_loss(VICReg()), vicreg, 2, id="vicreg"),
        pytest.param(step_loss(BarlowTwins()), barlow_twins, 2, id="barlow_twins"),
        pytest.param(our_dino, dino, 5, id="dino"),
    ],
)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
def test_values_and_gradients_are_those_of_the_definition(ours, definition, count, dtype, error):
    generator = torch.Generator().manual_seed(0)
    # a spread near 1, at which VICReg's variance term begins, and a mean that is not 0
    given = [torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64) + 0.3 for _ in range(count)]
    results = []
    for loss in (ours, definition):
        leaves = [one.to(dtype).requires_grad_() for one in given]
        value = loss(*leaves)
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=error, atol=error * float(expected.abs().max()))


# Orchestra


def test_cluster_loss_of_two_images():
    """t = 1, centroids e1, e2. A target at e1 wants (e, 1) / (e + 1) = (p, q). An online e1 gives it: the entropy of
    (p, q); an online e2 gives (q, p): -p ln q - q ln p.
    """
    p = math.e / (math.e + 1)
    q = 1 - p
    centroids = torch.stack([E1, E2])
    target = torch.stack([E1, E1])
    agreeing = -p * math.log(p) - q * math.log(q)
    opposed = -p * math.log(q) - q * math.log(p)
    loss = cluster_loss(torch.stack([E1, E2]), target, centroids, 1.0)
    assert float(loss) == pytest.approx((agreeing + opposed) / 2)


def test_images_are_turned_by_their_place():
    images = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(5, 1, 2, 2)
    turned, turns = turn(images)
    assert turns.tolist() == [0, 1, 2, 3, 0]
    assert turned[:4, 0].tolist() == [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]


def test_orchestra_takes_square_images_alone():
    with pytest.raises(UserError, match="must be square, got 8x6 pixels"):
        Orchestra(name="orchestra").recorded((1, 8, 6))


def test_the_memory_drops_the_oldest():
    model = Orchestra(features=2, clusters=2, memory=3).build(Flat(), 2)
    model.remember(torch.stack([E1, E2]))
    model.remember(torch.stack([-E1, -E2]))
    assert torch.equal(model.memory, torch.stack([E2, -E1, -E2]))
    model.remember(torch.stack([E1, E1, E2, E2]))
    assert torch.equal(model.memory, torch.stack([E1, E2, E2]))
