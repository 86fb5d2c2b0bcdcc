"""Each baseline's arithmetic on two clients with tensors small enough to compute by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedkernels import nt_xent
from fedssl.aggregators.base_model import BASE, BaseModel
from fedssl.aggregators.dictionary import DICTIONARY, Dictionary
from fedssl.aggregators.l_dawa import LDawa
from fedssl.aggregators.orchestra_clusters import (
    GLOBAL,
    LOCAL,
    OrchestraClusters,
    cluster_globally,
    cluster_locally,
    equal_assignment,
)
from fedssl.client import Client, LocalRound
from fedssl.data.augmentation import AugmentationOptions
from fedssl.local_updates.fedema import FedEMA
from fedssl.local_updates.fedu import FedU
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.objectives.byol import BYOL
from fedssl.objectives.fedx import FedX
from fedssl.objectives.orchestra import Orchestra, OrchestraModel, cluster_loss, turn
from fedssl.objectives.simclr import SimCLR
from fedssl.regularizers.base_alignment import BaseAlignment
from fedssl.regularizers.decorrelation import Decorrelation, decorrelation_loss
from fedssl.regularizers.dictionary_contrast import DictionaryContrast, added_negatives
from fedssl.regularizers.global_distillation import GlobalDistillation
from fedssl.regularizers.relational_distillation import RelationalDistillation, relational_loss

E1, E2 = torch.eye(2)
#: a temperature at which a cosine of 1 weighs exp(1 / t) = 3 and one of 0 weighs 1
THREE = 1 / math.log(3)


class Scale(nn.Module):
    """A linear layer without bias: one weight [out, in] to compute with."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


def scalar_model(encoder=0.0, second=None, predictor=0.0) -> Model:
    """Networks of one number each; the encoder has two such layers where `second` is given."""
    layers = [Scale([[encoder]])] + ([Scale([[second]])] if second is not None else [])
    online = {"encoder": nn.Sequential(*layers), "projector": Scale([[0.0]]), "predictor": Scale([[predictor]])}
    return Model(online, target_parts=("encoder", "projector"))


def local_round(model, received=None, number=1, images=None, objective=None, index=0, memory=None) -> LocalRound:
    images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8) if images is None else images
    client = Client(index, images, torch.zeros(len(images)), None, model, memory or Message())
    return LocalRound(
        client, received or Message(), number, 0, objective or BYOL(), AugmentationOptions(crop_scale=(1, 1))
    )


def online(model: Model) -> Message:
    return Message({name: t.clone() for name, t in model.state_dict().items() if name.startswith("online.")})


def value(model: Model, name: str) -> float:
    return float(model.online[name].state_dict()["weight" if name != "encoder" else "0.weight"])


def move(model: Model, by: float, second: float | None = None, predictor: float | None = None) -> None:
    """What stands for local training."""
    with torch.no_grad():
        model.encoder[0].weight += by
        if second is not None:
            model.encoder[1].weight += second
        if predictor is not None:
            model.online["predictor"].weight.fill_(predictor)


def one_round(part, model, memory, received, number, **moved) -> LocalRound:
    local = local_round(model, received, number, memory=memory)
    after_training = part.receive(local)
    move(model, **moved)
    after_training()
    return local


# FedU


def test_fedu_keeps_the_predictor_of_the_client_that_moved_far():
    """Divergences: near (|0.1| + |-0.3|) / 2 = 0.2, far (0.1 + 0.9) / 2 = 0.5; the threshold is 0.4."""
    part = FedU(name="fedu")
    first = online(scalar_model(1.0, 1.0, predictor=2.0))
    second = online(scalar_model(6.0, 6.0, predictor=7.0))
    moves = {"near": (0.1, -0.3), "far": (0.1, 0.9)}
    wanted = {"near": (0.2, 7.0), "far": (0.5, 5.0)}
    for who in ("near", "far"):
        model, memory = scalar_model(0.0, 0.0), Message()
        local = one_round(part, model, memory, first, 1, by=moves[who][0], second=moves[who][1], predictor=5.0)
        assert local.logged()["global_predictor"] == 1  # the first round takes everything
        assert memory.numbers["fedu.divergence"] == pytest.approx(wanted[who][0])
        local = local_round(model, second, 2, memory=memory)
        part.receive(local)
        assert value(model, "encoder") == 6.0
        assert value(model, "predictor") == wanted[who][1]
        assert local.logged()["global_predictor"] == float(who == "near")


# FedEMA


def test_fedema_mixes_by_each_clients_divergence_and_sets_lambda_once():
    """tau = 0.7. Client a moves by 0.5, then 0.25: lambda = 1.4, mu = 0.7, then 0.35.
    Client b moves by 2, then 4: lambda = 0.35, mu = 0.7, then min(1, 1.4) = 1.

    Round 1 starts from 1, so the clients have 1.5 and 3. Round 2 brings 10: they start from
    0.7 * 1.5 + 0.3 * 10 = 4.05 and 0.7 * 3 + 0.3 * 10 = 5.1, and end at 4.3 and 9.1.
    Round 3 brings 20: 0.35 * 4.3 + 0.65 * 20 = 14.505, and 9.1 unchanged.
    """
    part = FedEMA(name="fedema")
    rows = {"a": (0.5, 0.25, 1.4, 4.05, 14.505, 0.35), "b": (2.0, 4.0, 0.35, 5.1, 9.1, 1.0)}
    for by1, by2, rate, start2, start3, mu3 in rows.values():
        model, memory = scalar_model(), Message()
        local = one_round(part, model, memory, online(scalar_model(1.0, predictor=1.0)), 1, by=by1)
        assert local.logged() == pytest.approx({"mu": 0.0, "divergence": by1, "lambda": rate})
        local = one_round(part, model, memory, online(scalar_model(10.0, predictor=10.0)), 2, by=by2)
        assert local.logged() == pytest.approx({"mu": 0.7, "divergence": by2, "lambda": rate}, rel=1e-5)
        assert value(model, "encoder") == pytest.approx(start2 + by2)
        assert value(model, "predictor") == pytest.approx(0.7 * 1 + 0.3 * 10)
        local = local_round(model, online(scalar_model(20.0)), 3, memory=memory)
        part.receive(local)
        assert value(model, "encoder") == pytest.approx(start3, rel=1e-5)
        assert local.logged()["mu"] == pytest.approx(mu3, rel=1e-5)


def test_fedema_takes_the_global_model_after_a_round_without_the_client():
    part, model, memory = FedEMA(name="fedema"), scalar_model(), Message()
    one_round(part, model, memory, online(scalar_model(1.0)), 1, by=0.5)
    local = one_round(part, model, memory, online(scalar_model(10.0)), 3, by=0.5)
    assert local.logged()["mu"] == 0
    assert value(model, "encoder") == 10.5
    assert float(model.target["encoder"][0].weight) == 10.0
    assert memory.numbers["fedema.lambda"] == pytest.approx(1.4)


def test_fedema_without_movement_has_no_lambda_yet():
    part, model, memory = FedEMA(name="fedema"), scalar_model(), Message()
    one_round(part, model, memory, online(scalar_model(1.0)), 1, by=0.0)
    assert "fedema.lambda" not in memory.numbers
    one_round(part, model, memory, online(scalar_model(10.0)), 2, by=0.5)
    assert value(model, "encoder") == 10.5
    assert memory.numbers["fedema.lambda"] == pytest.approx(1.4)


# L-DAWA


def test_l_dawa_scales_each_tensor_by_its_cosine_and_averages_statistics_by_samples():
    """Global (1, 0). cos((2, 0)) = 1, cos((3, 4)) = 3/5: w = ((2, 0) + 0.6 (3, 4)) / 2 = (1.9, 1.2).

    Samples 1 and 3: running mean (1 + 3 * 5) / 4 = 4, counter (3 + 3 * 8) / 4 = 6.75 -> 7.
    The bias was 0 and has no angle: (2 + 4) / 2 = 3. Mean cosines: (1 + 1) / 2 and (0.6 + 1) / 2.
    """
    server = Message(
        {
            "online.w": torch.tensor([1.0, 0.0]),
            "online.b": torch.tensor([0.0]),
            "online.bn.running_mean": torch.tensor([0.0]),
            "online.bn.num_batches_tracked": torch.tensor(0),
        }
    )
    weights = {0: ([2.0, 0.0], 2.0, 1.0, 3, 1), 1: ([3.0, 4.0], 4.0, 5.0, 8, 3)}
    replies = {
        k: Message(
            {
                "online.w": torch.tensor(w),
                "online.b": torch.tensor([b]),
                "online.bn.running_mean": torch.tensor([mean]),
                "online.bn.num_batches_tracked": torch.tensor(count),
            },
            {"samples": samples},
        )
        for k, (w, b, mean, count, samples) in weights.items()
    }
    part = LDawa(name="l_dawa", plain_rounds=1)
    plain = part.aggregate(server, replies)
    assert plain.numbers == {"l_dawa.rounds": 1}
    torch.testing.assert_close(plain.tensors["online.w"], torch.tensor([(2 + 3 * 3) / 4, 3 * 4 / 4]))
    server.numbers.update(plain.numbers)
    state = part.aggregate(server, replies)
    torch.testing.assert_close(state.tensors["online.w"], torch.tensor([1.9, 1.2]))
    torch.testing.assert_close(state.tensors["online.b"], torch.tensor([3.0]))
    torch.testing.assert_close(state.tensors["online.bn.running_mean"], torch.tensor([4.0]))
    assert state.tensors["online.bn.num_batches_tracked"] == 7
    assert state.numbers == {"l_dawa.rounds": 2}
    assert state.metrics == pytest.approx({"l_dawa_cosine/0": 1.0, "l_dawa_cosine/1": 0.8})


# FedDecorr


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
    term = Decorrelation(name="decorrelation", weight=0.1).start_round(local)
    step = Step(torch.tensor(0.0), (together, apart))
    assert float(term(step)) == pytest.approx(0.1 * (4 / 3) / 2)
    assert local.logged()["mean_squared_correlation"] == pytest.approx(0.5)


def test_decorrelation_pulls_a_collapsed_batch_apart():
    torch.manual_seed(0)
    z = (torch.randn(32, 1) @ torch.randn(1, 8) + 0.1 * torch.randn(32, 8)).requires_grad_()
    before = float(decorrelation_loss(z.detach()))
    for _ in range(50):
        (gradient,) = torch.autograd.grad(decorrelation_loss(z), z)
        z = (z - gradient).detach().requires_grad_()
    assert float(decorrelation_loss(z.detach())) < before / 2


# FedX


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


def flat_model(projector, predictor=((1.0, 0.0), (0.0, 1.0))) -> Model:
    """Images [n, 1, 2, 2] -> 4 numbers -> 2 by the projector -> 2 by the predictor."""
    return Model({"encoder": nn.Flatten(), "projector": Scale(projector), "predictor": Scale(predictor)})


FIRST_TWO = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0))
SWAPPED = ((0.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0))


def test_global_distillation_compares_with_the_model_that_arrived():
    """Two images with predictions e1, e2 and, under the arrived projector, second views e1, e2: each row has its
    positive at cosine 1 and two others at 0, so the loss is ln(3 + 1 + 1) - ln 3. The second client received the
    swapped projector: positives at 0, one other at 1: ln(1 + 3 + 1) - ln 1. Neither client's own projector matters.
    """
    views = torch.eye(4)[:2].reshape(2, 1, 2, 2)
    predictions = torch.stack([E1, E2])
    images = torch.randint(0, 255, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for arrived, expected in ((FIRST_TWO, math.log(5 / 3)), (SWAPPED, math.log(5))):
        model = flat_model(((9.0, 8.0, 7.0, 6.0), (5.0, 4.0, 3.0, 2.0)))
        received = Message({"online.projector.weight": torch.tensor(arrived)})
        local = local_round(model, received, images=images, objective=FedX())
        part = GlobalDistillation(name="global_distillation", weight=2.0, temperature=THREE, batch_size=4)
        term = part.start_round(local)
        step = Step(torch.tensor(0.0), (), (), (predictions, predictions), views=(views, views))
        total = float(term(step))
        logged = local.logged()
        assert logged["global_contrastive_loss"] == pytest.approx(expected, rel=1e-5)
        assert logged["global_relational_loss"] == pytest.approx(0.0, abs=1e-6)  # both predictions agree
        assert total == pytest.approx(2 * expected, rel=1e-5)
        assert model.online["projector"].weight[0, 0] == 9.0


def test_relational_distillation_trains_the_network():
    model = flat_model(FIRST_TWO)
    images = torch.randint(0, 255, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    local = local_round(model, images=images, objective=FedX())
    term = RelationalDistillation(name="relational_distillation", batch_size=4).start_round(local)
    projections = tuple(model.online["projector"](v) for v in torch.rand(2, 3, 1, 2, 2))
    loss = term(Step(torch.tensor(0.0), (), projections))
    loss.backward()
    assert local.logged()["local_relational_loss"] == pytest.approx(float(loss.detach()))
    assert model.online["projector"].weight.grad.abs().sum() > 0


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


def test_equal_assignment_by_hand():
    """With sharpness ln 3, cosines (1, 0) and (0, 1) give rows (3, 1) / 4 and (1, 3) / 4: columns sum to 1 already.
    Two equal rows (a, b) must share both clusters: each column is scaled to sum 1, so every entry is 1/2.
    """
    plan = equal_assignment(torch.eye(2), 100, sharpness=math.log(3))
    torch.testing.assert_close(plan, torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
    plan = equal_assignment(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 100)
    torch.testing.assert_close(plan, torch.full((2, 2), 0.5))


def test_equal_assignment_fills_every_cluster():
    scores = torch.rand(60, 6, generator=torch.Generator().manual_seed(0)) + torch.tensor([1.0, 0, 0, 0, 0, 0])
    plan = equal_assignment(scores, 1000)
    torch.testing.assert_close(plan.sum(dim=1), torch.ones(60))
    torch.testing.assert_close(plan.sum(dim=0), torch.full((6,), 10.0), rtol=0.05, atol=0)


def at(*degrees: float) -> torch.Tensor:
    radians = torch.deg2rad(torch.tensor(degrees))
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_local_and_global_clusters_of_two_clients():
    """Client a remembers 0, 10, 90 and 100 degrees: centroids at 5 and 95. Client b 10, 20, 100, 110: 15 and 105.
    The server's two clusters part {5, 15} from {95, 105}.
    """
    found = []
    for index, degrees in enumerate([(0, 10, 90, 100), (10, 20, 100, 110)]):
        for seed in range(5):  # whatever the first centroids are
            centroids = cluster_locally(at(*degrees), 2, torch.Generator().manual_seed(seed))
            order = centroids[:, 1].argsort()
            torch.testing.assert_close(centroids[order], at(5 + 10 * index, 95 + 10 * index))
        found.append(centroids[order])
    part = OrchestraClusters(name="orchestra_clusters", local_clusters=2)
    replies = {k: Message({LOCAL: c}, {"samples": 1}) for k, c in enumerate(found)}
    state = part.aggregate(Message({GLOBAL: at(40, 60)}), replies)
    chosen = (torch.cat(found) @ state.tensors[GLOBAL].T).argmax(dim=1).tolist()
    assert chosen == [0, 1, 0, 1]
    torch.testing.assert_close(state.tensors[GLOBAL].norm(dim=1), torch.ones(2))
    assert state.metrics == {"clusters_used/global": 2}


def test_one_step_of_the_global_clustering_by_hand():
    """Points e1 (client a) and e2 (client b), centroids e1, e2, t = 1.

    Sharpness 25 makes the wanted assignments e1, e2 (to 1e-11). With u = s_11 - s_12 the first point's cosine is
    f = 1 / sqrt(1 + exp(-2u)), df/du = exp(-2u) (1 + exp(-2u))^(-3/2) = 0.111873 at u = 1. The loss is minus the mean
    of two such: dL/dc_1 = -0.0559367 e1 + 0.0559367 e2, plus weight decay 1e-4 e1. A step of 0.01 and normalising:
    c_1 = (1.000558, -0.000559367) / norm = (0.9999998, -0.000559055), and c_2 the mirror image.
    """
    points = torch.eye(2)
    moved = cluster_globally(points, torch.eye(2), 1.0, steps=1)
    large, small = 0.9999998, -0.000559055
    torch.testing.assert_close(moved, torch.tensor([[large, small], [small, large]]), rtol=0, atol=5e-7)


def orchestra_model(features=2, clusters=2, memory=3) -> OrchestraModel:
    encoder = nn.Flatten()
    encoder.num_features = 4
    model = Orchestra(features=features, clusters=clusters, memory=memory).build(encoder, 10)
    assert isinstance(model, OrchestraModel)
    return model


def test_the_memory_drops_the_oldest():
    model = orchestra_model()
    model.remember(torch.stack([E1, E2]))
    model.remember(torch.stack([-E1, -E2]))
    assert torch.equal(model.memory, torch.stack([E2, -E1, -E2]))
    model.remember(torch.stack([E1, E1, E2, E2]))
    assert torch.equal(model.memory, torch.stack([E1, E2, E2]))


# FedCA


def test_the_dictionary_joins_the_clients_newest_projections():
    model = Model({"encoder": nn.Flatten(), "projector": Scale(FIRST_TWO)})
    # pixel 255 is 2 and 128 about 0.008, so the first image projects to almost e1, the second to almost e2
    images = torch.full((2, 1, 2, 2), 128, dtype=torch.uint8)
    images[0, 0, 0, 0] = images[1, 0, 0, 1] = 255
    part = Dictionary(name="dictionary", samples=5)
    sent = part.collect(local_round(model, images=images, index=1), [])
    assert list(sent.tensors) == ["dictionary.1"]
    rows = sent.tensors["dictionary.1"]
    torch.testing.assert_close(rows[rows[:, 0].argsort(descending=True)], torch.eye(2), rtol=0, atol=0.01)
    server = Message()
    assert part.broadcast(server, [0, 1], [])[0].tensors == {}
    server.tensors |= part.aggregate(server, {1: sent}).tensors
    server.tensors |= part.aggregate(server, {0: Message({"dictionary.0": -torch.eye(2)})}).tensors
    down = part.broadcast(server, [0, 1], [])
    assert torch.equal(down[1].tensors[DICTIONARY], torch.cat([-torch.eye(2), rows]))


def test_the_dictionary_adds_negatives():
    """One image, both views e1: its only other row is the positive, weight 3 at THREE. A dictionary (e1, e2) adds
    3 + 1: ln(3 + 4) - ln 3. With the objective, whose loss is 0 here, that is -ln(3 / 7).
    """
    dictionary = torch.stack([E1, E2])
    assert float(added_negatives(E1[None], E1[None], dictionary, THREE)) == pytest.approx(math.log(7 / 3))
    received = Message({DICTIONARY: dictionary})
    step = Step(torch.tensor(0.0), (), (E1[None], 4 * E1[None]))
    part = DictionaryContrast(name="dictionary_contrast", weight=0.5)
    term = part.start_round(local_round(scalar_model(), received, objective=SimCLR(temperature=THREE)))
    assert float(term(step)) == pytest.approx(0.5 * math.log(7 / 3))
    assert float(part.start_round(local_round(scalar_model()))(step)) == 0  # the first round has no dictionary


def test_the_sum_is_the_loss_with_all_negatives():
    torch.manual_seed(0)
    first, second, dictionary = (nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (4, 4, 7))
    rows = torch.cat([first, second])
    logits = torch.cat([rows @ rows.T, rows @ dictionary.T], dim=1) / 0.3
    logits[torch.arange(8), torch.arange(8)] = -torch.inf
    positives = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    expected = nn.functional.cross_entropy(logits, positives)
    total = nt_xent(first, second, 0.3) + added_negatives(first, second, dictionary, 0.3)
    torch.testing.assert_close(total, expected)


def test_the_base_model_is_sent_once_and_kept():
    """Encoders of one number: client 2, base 5. Images 1 and 3: ((2 - 5) 1)^2 = 9 and 81, mean 45, weight 0.1."""
    part = BaseModel(name="base_model")
    server = Message({f"{BASE}0.weight": torch.tensor([[5.0]])})
    down = part.broadcast(server, [0, 1], [])
    assert list(down[0].tensors) == [f"{BASE}0.weight"]
    server.numbers |= part.aggregate(server, {0: Message()}).numbers
    again = part.broadcast(server, [0, 1], [])
    assert again[0].tensors == {}
    assert list(again[1].tensors) == [f"{BASE}0.weight"]
    memory = Message()
    for received in (down[0], again[0]):
        model = scalar_model(2.0)
        local = local_round(model, received, memory=memory)
        term = BaseAlignment(name="base_alignment", weight=0.1).start_round(local)
        images = torch.tensor([[1.0], [3.0]])
        step = Step(torch.tensor(0.0), (model.encoder(images),), views=(images,))
        assert float(term(step).detach()) == pytest.approx(4.5)
        assert value(model, "encoder") == 2.0
