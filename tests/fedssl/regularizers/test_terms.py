"""Terms of one batch, of public images and of other models: by hand, and against their definitions."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fedkernels import nt_xent
from fedssl.aggregators.dictionary import DICTIONARY
from fedssl.aggregators.representation_mean import FACTOR, KERNEL
from fedssl.client import LocalRound
from fedssl.data.pixels import normalize
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.objectives.fedx import FedX
from fedssl.objectives.simclr import SimCLR
from fedssl.regularizers.cka_alignment import CKAAlignment
from fedssl.regularizers.decorrelation import Decorrelation, decorrelation_loss
from fedssl.regularizers.dictionary_contrast import DictionaryContrast, added_negatives
from fedssl.regularizers.distance_to_global import DistanceToGlobal
from fedssl.regularizers.global_distillation import GlobalDistillation
from fedssl.regularizers.proximal import Proximal
from fedssl.regularizers.relational_distillation import RelationalDistillation, relational_loss
from fedssl.regularizers.representation_alignment import RepresentationAlignment
from fedssl.regularizers.similarity_distillation import SimilarityDistillation
from fedssl.teacher import similarity_loss
from tests.fedssl.aggregators.test_by_hand import kernel_of
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.models.test_model import images, staged
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.small_models import E1, E2, FIRST_TWO, SWAPPED, THREE, Scale, flat_model, local_round, scalar_model

# The terms of FedDecorr, FedCA and FedX

SIX_IMAGES = torch.randint(0, 255, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_what_is_logged_with_its_gradient_is_read_without_a_warning():
    """As a regulariser of one's own may log its loss; torch warns of it once a process."""
    local = local_round(scalar_model())
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for value in (torch.tensor(2.0, requires_grad=True) * 2, 1):
                local.log("mine", value)
            assert local.logged() == {"mine": 2.5}
    finally:
        torch.set_warn_always(always)


def test_decorrelation_of_two_clients():
    """Three images. Client a: both columns (-1, 0, 1), standard deviation 1, so z'z off the diagonal is 2: 2^2 / 3.
    Client b: (-1, 0, 1) and (1, -2, 1) are orthogonal: 0. r = 1 in a gives the logged mean square 1.
    """
    together = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    apart = torch.tensor([[-1.0, 1.0], [0.0, -2.0], [1.0, 1.0]])
    assert float(decorrelation_loss(together)) == pytest.approx(4 / 3)
    assert float(decorrelation_loss(5 * together + 7)) == pytest.approx(4 / 3)
    assert float(decorrelation_loss(apart)) == pytest.approx(0.0, abs=1e-6)
    assert float(decorrelation_loss(together[:, :1])) == 0
    local = local_round(scalar_model())
    term = Decorrelation(weight=0.1).start_round(local)
    assert float(term(Step(torch.tensor(0.0), (together, apart)))) == pytest.approx(0.1 * (4 / 3) / 2)
    assert local.logged()["mean_squared_correlation"] == pytest.approx(0.5)


def test_the_dictionary_adds_negatives():
    """One image, both views e1: its only other row is the positive, weight 3 at THREE. A dictionary (e1, e2) adds
    3 + 1: ln(3 + 4) - ln 3. With the objective, whose loss is 0 here, that is -ln(3 / 7).
    """
    dictionary = torch.stack([E1, E2])
    assert float(added_negatives(E1[None], E1[None], dictionary, THREE)) == pytest.approx(math.log(7 / 3))
    step = Step(torch.tensor(0.0), (), (E1[None], 4 * E1[None]))
    part, objective = DictionaryContrast(weight=0.5), SimCLR(temperature=THREE)
    term = part.start_round(local_round(scalar_model(), Message({DICTIONARY: dictionary}), objective=objective))
    assert float(term(step)) == pytest.approx(0.5 * math.log(7 / 3))
    assert float(part.start_round(local_round(scalar_model()))(step)) == 0  # the first round has no dictionary


def test_with_a_dictionary_the_sum_is_the_loss_with_all_negatives():
    torch.manual_seed(0)
    first, second, dictionary = (nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (4, 4, 7))
    rows = torch.cat([first, second])
    logits = torch.cat([rows @ rows.T, rows @ dictionary.T], dim=1) / 0.3
    logits[torch.arange(8), torch.arange(8)] = -torch.inf
    expected = nn.functional.cross_entropy(logits, torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]))
    total = nt_xent(first, second, 0.3) + added_negatives(first, second, dictionary, 0.3)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("arrived", "expected"), [(FIRST_TWO, math.log(5 / 3)), (SWAPPED, math.log(5))])
def test_global_distillation_compares_with_the_model_that_arrived(arrived, expected):
    """Two images with predictions e1, e2 and, under the arrived projector, second views e1, e2: each row has its
    positive at cosine 1 and two others at 0, so the loss is ln(3 + 1 + 1) - ln 3. The second client received the
    swapped projector: positives at 0, one other at 1: ln(1 + 3 + 1) - ln 1. Neither client's own projector matters.
    """
    views, predictions = torch.eye(4)[:2].reshape(2, 1, 2, 2), torch.stack([E1, E2])
    model = flat_model(((9.0, 8.0, 7.0, 6.0), (5.0, 4.0, 3.0, 2.0)))
    received = Message({"online.projector.weight": torch.tensor(arrived)})
    local = local_round(model, received, images=SIX_IMAGES, objective=FedX())
    term = GlobalDistillation(weight=2.0, temperature=THREE, batch_size=4).start_round(local)
    total = float(term(Step(torch.tensor(0.0), (), (), (predictions, predictions), views=(views, views))))
    assert local.logged()["global_contrastive_loss"] == pytest.approx(expected, rel=1e-5)
    assert local.logged()["global_relational_loss"] == pytest.approx(0.0, abs=1e-6)  # both predictions agree
    assert total == pytest.approx(2 * expected, rel=1e-5)
    assert model.online["projector"].weight[0, 0] == 9.0


def test_relational_loss_of_two_clients():
    """At THREE, e1 over the others (e1, e2) gives (3, 1) / 4, e2 gives (1, 3) / 4; their mixture is (1, 1) / 2.

    Client a's views are e1 and e2: 3/4 ln(3/2) + 1/4 ln(1/2). Client b's agree: 0.
    """
    others = torch.stack([5 * E1, E2])  # lengths do not matter
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(relational_loss(E1[None], 2 * E2[None], others, THREE)) == pytest.approx(expected)
    assert float(relational_loss(E1[None], 3 * E1[None], others, THREE)) == pytest.approx(0.0, abs=1e-7)
    both = relational_loss(torch.stack([E1, E1]), torch.stack([E2, E1]), others, THREE)
    assert float(both) == pytest.approx(expected / 2)


def test_gradients_of_relational_distillation_pass_both_views_and_the_random_images():
    model, projections = flat_model(FIRST_TWO), torch.rand(2, 3, 2, requires_grad=True)
    local = local_round(model, images=SIX_IMAGES, objective=FedX())
    term = RelationalDistillation(batch_size=4).start_round(local)
    loss = term(Step(torch.tensor(0.0), (), tuple(projections)))
    loss.backward()
    assert local.logged()["local_relational_loss"] == pytest.approx(float(loss.detach()))
    assert projections.grad.abs().sum(dim=(1, 2)).min() > 0
    assert model.online["projector"].weight.grad.abs().sum() > 0


# Hetero-SSFL's term and its control on public images

NO_STEP = Step(torch.tensor(0.0), ())


def opened(tiny: Any, client: int = 0, **options: Any) -> tuple[LocalRound, Message]:
    """What a client has when round 1 begins, and the server's state after the opening round."""
    aggregators = [{"name": "representation_mean"} | options]
    federation = build_federation(tiny(**ALIGNED | SMALL | {"aggregators": aggregators}))
    method, done = federation.method, train_rounds(federation, 0)
    received = method.broadcast(done.server, [client], 1)[client]
    one = federation.client(client, done.clients[client])
    return LocalRound(one, received, 1, 0, method.objective, method.augmentation), done.server


@pytest.mark.parametrize("part", [CKAAlignment, SimilarityDistillation])
@pytest.mark.parametrize(
    ("kernel", "layer", "centered"),
    [("linear", "encoder", True), ("half_whitened", "encoder", False), ("half_whitened", "predictor", True)],
)
def test_factor_and_kernel_give_the_same_term_and_gradient(part, kernel, layer, centered, tiny):
    """What travels must not change what is learned."""
    terms, gradients = [], []
    for form in (FACTOR, KERNEL):
        local, server = opened(tiny, client=1, kernel=kernel, layer=layer, centered=centered)
        joined = torch.cat(list(server.tensors.values()), dim=1)
        local.received.tensors = {form: joined if form == FACTOR else joined @ joined.T}
        model = local.client.model.train()
        term = part(weight=0.5, batch_size=16).start_round(local)(NO_STEP)
        term.backward()
        terms.append(term.detach())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(terms[0], terms[1], atol=1e-5, rtol=1e-5)
    assert len(gradients[0]) == len(gradients[1]) > 0
    scale = max(float(g.abs().max()) for g in gradients[0])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one / scale, other / scale, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("centered", [False, True])
def test_the_term_is_mu_times_one_minus_eq_1(centered, tiny):
    """All 20 public images in one batch, a network in evaluation mode: the term by hand from the definition."""
    local, server = opened(tiny, layer="encoder", kernel="linear", centered=centered)
    client = local.client
    term = CKAAlignment(weight=0.7, batch_size=20).start_round(local)(NO_STEP)
    own = client.model.represent(normalize(client.public_images), "encoder").double().detach()
    if centered:
        own = own - own.mean(dim=0)
    a, b = kernel_of(own), sum(map(kernel_of, server.tensors.values())) / 3
    if centered:  # for the linear kernel this was done before
        a, b = (k - k.mean(0) - k.mean(1)[:, None] + k.mean() for k in (a, b))
    cka = float((a * b).sum() / (a.norm() * b.norm()))
    assert float(term.detach()) == pytest.approx(0.7 * (1 - cka), abs=1e-5)
    assert local.logged()["cka"] == pytest.approx(cka, abs=1e-5)


def test_similarities_are_those_of_whitened_representations_and_of_the_mean_kernel(tiny):
    """All 20 public images in one batch, a network in evaluation mode."""
    local, server = opened(tiny, layer="encoder", kernel="half_whitened", centered=True)
    client = local.client
    client.model.eval()
    term = SimilarityDistillation(weight=0.7, batch_size=20, temperature=0.3).start_round(local)(NO_STEP)
    own = client.model.represent(normalize(client.public_images), "encoder").double().detach()
    own = own - own.mean(dim=0)
    values, vectors = torch.linalg.eigh(own @ own.T)
    a = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    a = a * a.diagonal().rsqrt() * a.diagonal().rsqrt()[:, None]
    b = sum(map(kernel_of, server.tensors.values())) / 3
    b = b * b.diagonal().rsqrt() * b.diagonal().rsqrt()[:, None]
    expected = float(similarity_loss(a, b, 0.3))
    assert float(term.detach()) == pytest.approx(0.7 * expected, rel=1e-3)
    assert local.logged()["similarity_divergence"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["cka_alignment", "similarity_distillation", "public_objective"])
def test_public_images_leave_no_trace_in_the_running_statistics(name, tiny):
    """With weight 0 a client ends with the very model, buffers included, of a round without the term."""
    ends = []
    for regularizers in ([{"name": name, "weight": 0.0, "batch_size": 12}], []):
        aggregators = ALIGNED["aggregators"] if regularizers and name != "public_objective" else []
        parts = {"regularizers": regularizers, "aggregators": aggregators}
        federation = build_federation(tiny(**ALIGNED | SMALL | parts))
        ends.append(train_rounds(federation, 1, clients=[0]).clients[0].tensors)
    names = [entry for entry in ends[1] if entry.startswith("model/")]
    assert any("running_mean" in entry for entry in names)
    for entry in names:
        assert torch.equal(ends[0][entry], ends[1][entry]), entry


# Terms that compare the model with the received or the previous one

IDENTITY, EXCHANGED, TURNED = ([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]], [[0.0, -1.0], [1.0, 0.0]])


def weights(rows, part="encoder") -> Message:
    return Message({f"online.{part}.weight": torch.tensor(rows)})


def step_at(model: Model, *views: torch.Tensor) -> Step:
    representations = tuple(model.encoder(view) for view in views)
    heads = model.online["projector"] if "projector" in model.online else nn.Identity()
    return Step(torch.zeros(()), representations, tuple(map(heads, representations)), views=views)


def pixels(*pairs) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.float32).reshape(-1, 1, 1, 2)


@pytest.mark.parametrize("part", [Proximal(weight=0.2), DistanceToGlobal(of="weights", weight=0.2)])
def test_the_distance_of_weights_by_hand(part):
    """Two of four weights move, by 0.3 and -0.4: mu / 2 * (0.09 + 0.16) = 0.025 for mu = 0.2, gradient mu (w - w_t).

    What does not train does not count.
    """
    model = Model({"encoder": Scale([[1.0, 2.0], [3.0, 4.0]]), "projector": Scale(IDENTITY)})
    model.online["projector"].requires_grad_(False)
    local = local_round(model, weights([[1.0, 2.0], [3.0, 4.0]]))
    term = part.start_round(local)
    step = step_at(model, pixels((0, 0)))
    assert float(term(step).detach()) == 0
    with torch.no_grad():
        model.encoder.weight += torch.tensor([[0.3, 0.0], [0.0, -0.4]])
        model.online["projector"].weight += 1
    value = term(step)
    assert float(value.detach()) == pytest.approx(0.025)
    value.backward()
    torch.testing.assert_close(model.encoder.weight.grad, torch.tensor([[0.06, 0.0], [0.0, -0.08]]))
    if isinstance(part, Proximal):
        assert local.logged()["proximal_distance"] == pytest.approx(0.25)  # the mean of 0 and 0.5


def test_the_distance_of_representations_by_hand():
    """The own model is the identity, the global one swaps its two outputs.

    View 1 has the images (1, 0) and (3, 3): at distances |(1, 0) - (0, 1)|^2 = 2 and 0, so the mean is 1.
    View 2 has (0, 2) and (5, 0): both at distance 2 whatever their length. The mean over the views is 1.5.
    """
    part, model = DistanceToGlobal(weight=0.4), Model({"encoder": Scale(IDENTITY)})
    local = local_round(model, weights(EXCHANGED))
    value = part.start_round(local)(step_at(model, pixels((1, 0), (3, 3)), pixels((0, 2), (5, 0))))
    assert float(value.detach()) == pytest.approx(0.4 / 2 * 1.5)
    assert local.logged()["global_distance"] == pytest.approx(1.5)
    # Along the representation itself nothing pulls, as only directions count: for (1, 0) only row 1 has a gradient.
    part.start_round(local)(step_at(model, pixels((1, 0)))).backward()
    torch.testing.assert_close(model.encoder.weight.grad, torch.tensor([[0.0, 0.0], [-0.4, 0.0]]))


def test_equal_weights_have_distance_0_in_training_and_no_statistics_change(tiny):
    model = build_federation(tiny()).new_model(0).train()
    local = local_round(model, Message(model.online_state()).copy())
    term = DistanceToGlobal().start_round(local)
    views = torch.randn(2, 6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    step = Step(torch.zeros(()), tuple(map(model.encoder, views)), views=tuple(views))
    after_forward = {name: t.clone() for name, t in model.state_dict().items()}
    assert float(term(step).detach()) == pytest.approx(0.0, abs=1e-9)
    assert all(torch.equal(t, after_forward[name]) for name, t in model.state_dict().items())


def test_the_alignment_is_towards_what_arrived_and_away_from_the_clients_previous_model():
    """The views are e1 with 3 e1 and e2 with e2, which the model passes on. The global model turns all by 90 degrees,
    the previous one does nothing: each row is at right angles to its goal, -log(1 / (1 + 3)) = log 4, and 2 log 4 for
    weight 2. Where the previous model turns by 180 degrees, it is -log(1 / (1 + 1/3)) = log(4 / 3).
    """
    model, memory = Model({"encoder": nn.Flatten(), "projector": Scale(IDENTITY)}), Message()
    received, previous = weights(TURNED, "projector"), weights(IDENTITY, "projector").tensors
    part = RepresentationAlignment(weight=2.0, temperature=THREE)
    step = step_at(model, pixels((1, 0), (3, 0)), pixels((0, 1), (0, 1)))
    first = part.start_round(local_round(model, received, memory=memory, previous=previous))
    assert float(first(step)) == 0  # nothing is known of a previous round
    local = local_round(model, received, memory=memory, previous=previous)
    value = part.start_round(local)(step)
    assert float(value.detach()) == pytest.approx(2 * math.log(4), rel=1e-6)
    assert local.logged()["alignment_loss"] == pytest.approx(math.log(4), rel=1e-6)
    value.backward()
    gradient = model.online["projector"].weight.grad
    # pulling e1 to e2 and e2 to -e1 turns by 90 degrees; along the rows nothing changes the cosine
    assert gradient[1, 0] < 0 < gradient[0, 1]
    assert gradient[0, 0] == pytest.approx(0, abs=1e-6)
    behind = weights([[-1.0, 0.0], [0.0, -1.0]], "projector").tensors
    value = part.start_round(local_round(model, received, memory=memory, previous=behind))(step)
    assert float(value.detach()) == pytest.approx(2 * math.log(4 / 3), rel=1e-6)


def test_the_alignment_begins_anew_with_every_stage_and_passes_frozen_layers_once():
    part = RepresentationAlignment()
    encoder, memory, view = staged("small_resnet10"), Message(), images()
    model = Model({"encoder": encoder, "projector": nn.Linear(128, 8)})
    calls: list[int] = []
    for layer in (0, 1):
        encoder.switches(layer)[0].module.register_forward_hook(lambda m, i, o, layer=layer: calls.append(layer))
    values = []
    for active, frozen in ([[0], []], [[1], [0]], [[1], [0]]):
        encoder.use(active, frozen)
        term = part.start_round(local_round(model, memory=memory, previous=model.online_state()))
        calls.clear()
        values.append(float(term(step_at(model, view)).detach()))
    assert values[:2] == [0, 0]
    assert values[2] == pytest.approx(math.log(2), rel=0.1)  # all three models have the same weights
    assert calls == [0, 1, 1, 1]
