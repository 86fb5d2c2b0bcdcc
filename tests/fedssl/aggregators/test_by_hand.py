"""Weighted means, L-DAWA, base model and dictionary of FedCA, Orchestra's clusters, Hetero-SSFL's kernels, by hand."""

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from fedssl.aggregators.base import OWN_IMAGES, PROJECTION
from fedssl.aggregators.base_model import BASE, BaseModel
from fedssl.aggregators.dictionary import DICTIONARY, Dictionary
from fedssl.aggregators.eua import EUA
from fedssl.aggregators.l_dawa import LDawa
from fedssl.aggregators.orchestra_clusters import (
    GLOBAL,
    LOCAL,
    OrchestraClusters,
    cluster_globally,
    cluster_locally,
    equal_assignment,
)
from fedssl.aggregators.representation_mean import (
    FACTOR,
    KERNEL,
    WHITENING,
    RepresentationMean,
    canonical_factor,
    shared_directions,
    whitening_matrix,
)
from fedssl.aggregators.trimmed_mean import TrimmedMean
from fedssl.aggregators.weighted_mean import DISTANCE, WeightedMean
from fedssl.client import LocalRound
from fedssl.data.pixels import normalize
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.guard import Asked, capped_images, refusals
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.recipe.recipe import FlowerOptions
from fedssl.regularizers.base_alignment import BaseAlignment
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.small_models import FIRST_TWO, Scale, local_round, scalar_model, value

WEIGHT, MEAN = "online.encoder.weight", "online.encoder.bn.running_mean"


def at(x: float, y: float, mean: float = 0.0) -> Message:
    return Message({WEIGHT: torch.tensor([float(x), float(y)]), MEAN: torch.tensor([float(mean)])}, {"samples": 1.0})


@pytest.mark.parametrize(
    ("trim", "expected"), [(0.0, [200.6, -1.4]), (0.1, [200.6, -1.4]), (0.2, [2.0, 1.0]), (0.4, [2.0, 1.0])]
)
def test_the_trimmed_mean_by_hand(trim, expected):
    """Every entry is trimmed for itself, and no client counts for more: the third states many images."""
    replies = {k: at(*values) for k, values in enumerate([(1, 1), (2, 0), (997, 2), (0, -12), (3, 2)])}
    replies[2].numbers["samples"] = 1e9
    state = TrimmedMean(name="trimmed_mean", trim=trim).aggregate(at(0, 0), replies)
    torch.testing.assert_close(state.tensors[WEIGHT].double(), torch.tensor(expected).double())
    del replies[4]
    state = TrimmedMean(name="trimmed_mean", trim=0.4999999999).aggregate(at(0, 0), replies)
    assert state.tensors[WEIGHT].tolist() == [1.5, 0.5]  # of four the two in the middle are left


@pytest.mark.parametrize("part", [WeightedMean(), EUA(), LDawa()])
def test_the_distance_between_local_models_by_hand(part):
    """(0, 0), (3, 0) and (0, 4) are 3, 4 and 5 apart; running means count in no distance."""
    replies = {0: at(0, 0, mean=100), 4: at(3, 0), 7: at(0, 4, mean=-7)}
    server = Message(at(1, 1).tensors, {"l_dawa.rounds": 5.0})
    assert part.aggregate(server, replies).metrics[DISTANCE] == pytest.approx(4.0)


def test_there_is_no_distance_of_one_client_or_of_a_mean_that_stands_for_all():
    part, server = WeightedMean(), Message(at(1, 1).tensors)
    assert DISTANCE not in part.aggregate(server, {2: at(0, 0)}).metrics
    generator = torch.Generator().manual_seed(0)
    mean = {WEIGHT: torch.randn(5000, generator=generator)}
    server = Message({WEIGHT: torch.randn(5000, generator=generator)})
    replies = {k: Message(mean, {"samples": 1.0}) for k in range(5)}  # what secure aggregation gives
    assert DISTANCE not in part.aggregate(server, replies).metrics


def test_no_distance_is_logged_of_noisy_weights(tiny):
    federation = build_federation(tiny(**AVERAGED | SMALL))
    done = train_rounds(federation, 1)
    assert done.server.metrics[DISTANCE] > 0
    privacy = {"name": "local_dp", "clipping_norm": 1.0, "epsilon": 1.0, "delta": 1e-5}
    recipe = federation.recipe.model_copy(update={"flower": FlowerOptions(differential_privacy=privacy)})
    privately = pytest.importorskip("fedssl.engines.flower.privacy", reason="flwr is not installed")
    private = privately.private_federation(dataclasses.replace(federation, recipe=recipe))
    before = federation.method.initial_state()
    replies = {
        k: dataclasses.replace(reply, tensors=before.tensors, numbers=reply.numbers | {"samples": 1})
        for k, reply in done.replies[1].items()
    }
    assert DISTANCE not in private.method.aggregate(before, replies, 1).metrics


def test_l_dawa_scales_each_tensor_by_its_cosine_and_averages_statistics_by_samples():
    """The plain round before is the weighted mean, of one sample and of three.

    Global (1, 0). cos((2, 0)) = 1, cos((3, 4)) = 3/5: w = ((2, 0) + 0.6 (3, 4)) / 2 = (1.9, 1.2).

    Samples 1 and 3: running mean (1 + 3 * 5) / 4 = 4, counter (3 + 3 * 8) / 4 = 6.75 -> 7.
    The bias was 0 and has no angle: (2 + 4) / 2 = 3. Mean cosines: (1 + 1) / 2 and (0.6 + 1) / 2.
    """

    def state_of(w, bias, mean, count, samples=1):
        running = {"online.bn.running_mean": torch.tensor([mean]), "online.bn.num_batches_tracked": torch.tensor(count)}
        return Message({"online.w": torch.tensor(w), "online.b": torch.tensor([bias])} | running, {"samples": samples})

    server = Message(state_of([1.0, 0.0], 0.0, 0.0, 0).tensors)
    replies = {0: state_of([2.0, 0.0], 2.0, 1.0, 3), 1: state_of([3.0, 4.0], 4.0, 5.0, 8, samples=3)}
    part = LDawa(name="l_dawa", plain_rounds=1)
    plain = part.aggregate(server, replies)
    assert plain.numbers == {"l_dawa.rounds": 1}
    torch.testing.assert_close(plain.tensors["online.w"], torch.tensor([(2 + 3 * 3) / 4, 3 * 4 / 4]))
    torch.testing.assert_close(plain.tensors["online.bn.num_batches_tracked"], torch.tensor(7))
    server.numbers.update(plain.numbers)
    state = part.aggregate(server, replies)
    torch.testing.assert_close(state.tensors["online.w"], torch.tensor([1.9, 1.2]))
    torch.testing.assert_close(state.tensors["online.b"], torch.tensor([3.0]))
    torch.testing.assert_close(state.tensors["online.bn.running_mean"], torch.tensor([4.0]))
    assert state.tensors["online.bn.num_batches_tracked"] == 7
    assert state.numbers == {"l_dawa.rounds": 2}
    shares = {"l_dawa_share/0": 0.5, "l_dawa_share/1": 0.4}
    distance = {"local_model_distance/global": math.hypot(2 - 3, 0 - 4, 2 - 4)}
    assert state.metrics == pytest.approx({"l_dawa_cosine/0": 1.0, "l_dawa_cosine/1": 0.8} | shares | distance)


def test_the_base_model_is_sent_once_and_kept():
    """Encoders of one number: client 2, base 5. Images 1 and 3: ((2 - 5) 1)^2 = 9 and 81, mean 45.

    The second view is twice the first and has the mean 180. The weight is 0.1.
    """
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
        views = (torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [6.0]]))
        step = Step(torch.tensor(0.0), tuple(map(model.encoder, views)), views=views)
        assert float(term(step).detach()) == pytest.approx(11.25)
        assert value(model, "encoder") == 2.0


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


@pytest.mark.parametrize(("samples", "rows"), [(None, 9), (4, 4), (12, 9)])
def test_a_client_sends_a_projection_of_each_of_its_images_unless_told_how_many(samples, rows):
    model = Model({"encoder": nn.Flatten(), "projector": Scale(FIRST_TWO)})
    images = torch.arange(36, dtype=torch.uint8).reshape(9, 1, 2, 2)
    part = Dictionary(name="dictionary", samples=samples)
    sent = part.collect(local_round(model, images=images, index=1), []).tensors["dictionary.1"]
    assert sent.shape == (rows, 2)
    assert len(sent.unique(dim=0)) == rows  # of different images
    torch.testing.assert_close(sent.norm(dim=1), torch.ones(rows))


def test_a_client_may_send_as_many_projections_as_it_may_have_images():
    """It began with five: up to ten are plausible, as a site may collect more. Of another number nothing is known."""
    expected = Dictionary(name="dictionary").expected(Message(), 0, [])
    assert expected == {"dictionary.0": (OWN_IMAGES, PROJECTION)}
    asked_for_four = Dictionary(name="dictionary", samples=4).expected(Message(), 0, [])
    assert asked_for_four == {"dictionary.0": (range(1, 5), PROJECTION)}

    def refused(rows, samples):
        replies = {k: Message({"dictionary.0": torch.ones(n, 3)}, {"samples": 5.0}) for k, n in enumerate((rows, 5, 4))}
        asked = Asked({k: expected or {} for k in replies}, sizes={PROJECTION: 3}, samples=samples)
        return refusals(Message(), replies, asked)

    known = {0: 5, 1: 5, 2: 5}
    assert not refused(5, known)
    assert not refused(10, known)
    for rows in (0, 11):
        assert refused(rows, known) == {0: f"dictionary.0 has shape [{rows}, 3], expected [1 to 10, 3]"}
    assert not refused(11, {})


# Orchestra's clusters


def test_equal_assignment_by_hand():
    """With sharpness ln 3, cosines (1, 0) and (0, 1) give rows (3, 1) / 4 and (1, 3) / 4: columns sum to 1 already.
    Two equal rows (a, b) must share both clusters: each column is scaled to sum 1, so every entry is 1/2.
    """
    plan = equal_assignment(torch.eye(2), 100, sharpness=math.log(3))
    torch.testing.assert_close(plan, torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
    plan = equal_assignment(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 100)
    torch.testing.assert_close(plan, torch.full((2, 2), 0.5))


def on_circle(*degrees: float) -> torch.Tensor:
    radians = torch.deg2rad(torch.tensor(degrees))
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def test_local_and_global_clusters_of_two_clients():
    """Client a remembers 0, 10, 90 and 100 degrees: centroids at 5 and 95. Client b 10, 20, 100, 110: 15 and 105.
    The server's two clusters part {5, 15} from {95, 105}.
    """
    found = []
    for index, degrees in enumerate([(0, 10, 90, 100), (10, 20, 100, 110)]):
        for seed in range(5):  # whatever the first centroids are
            centroids = cluster_locally(on_circle(*degrees), 2, torch.Generator().manual_seed(seed))
            order = centroids[:, 1].argsort()
            torch.testing.assert_close(centroids[order], on_circle(5 + 10 * index, 95 + 10 * index))
        found.append(centroids[order])
    part = OrchestraClusters(name="orchestra_clusters", local_clusters=2)
    replies = {k: Message({LOCAL: c}, {"samples": 1}) for k, c in enumerate(found)}
    state = part.aggregate(Message({GLOBAL: on_circle(40, 60)}), replies)
    chosen = (torch.cat(found) @ state.tensors[GLOBAL].T).argmax(dim=1).tolist()
    assert chosen == [0, 1, 0, 1]
    torch.testing.assert_close(state.tensors[GLOBAL].norm(dim=1), torch.ones(2))
    assert state.metrics == {"clusters_used/global": 2}
    one_step = OrchestraClusters(name="orchestra_clusters", local_clusters=2, steps=1)  # too short for far clusters
    replies = {0: Message({LOCAL: on_circle(5, 20)}, {"samples": 1})}
    far = one_step.aggregate(Message({GLOBAL: on_circle(0, 180)}), replies)
    assert far.metrics == {"clusters_used/global": 1}


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


# Hetero-SSFL's mean kernel: what it is, in which form it is sent, and what each client sends for it


def kernel_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() @ tensor.double().T


def state_of(*sizes: tuple[int, int]) -> Message:
    torch.manual_seed(0)
    return Message({f"representation.{k}": torch.randn(size) for k, size in enumerate(sizes)})


def sent_by(part: RepresentationMean, server: Message, client: int = 0) -> dict[str, torch.Tensor]:
    return part.broadcast(server, [0, 1], [])[client].tensors


@pytest.mark.parametrize(("rows", "form"), [(9, FACTOR), (8, KERNEL)])
def test_what_is_sent_is_the_mean_kernel_or_a_factor_of_it_whichever_is_smaller(rows, form):
    """Clients 1 and 3 of four have answered: the others do not count."""
    a, b = state_of((rows, 3), (rows, 5)).tensors.values()
    [(name, sent)] = sent_by(RepresentationMean(), Message({"representation.1": a, "representation.3": b})).items()
    assert (name, sent.shape) == (form, (rows, 8))
    mean = kernel_of(sent) if name == FACTOR else sent.double()
    torch.testing.assert_close(mean, 0.5 * kernel_of(a) + 0.5 * kernel_of(b), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [((20, 3), (20, 5)), ((20, 6),)], ids=["two clients", "one has answered"])
@pytest.mark.parametrize("components", [None, 4])  # and one of equal rank that comes along, or all of one client
def test_a_factor_tells_nothing_that_the_mean_kernel_does_not(sizes, components):
    """Clients whose representations are rotated have the same kernels: what is sent is the same."""
    server, rotated = state_of(*sizes), Message()
    for name, a in server.tensors.items():
        rotation = torch.linalg.qr(torch.randn(a.shape[1], a.shape[1], dtype=torch.float64)).Q
        server.tensors[name], rotated.tensors[name] = a.double(), a.double() @ rotation
    part = RepresentationMean(components=components)
    sent, sent_rotated = (sent_by(part, state)[FACTOR] for state in (server, rotated))
    torch.testing.assert_close(sent, sent_rotated, atol=1e-13 if components is None else 1e-12, rtol=0)
    assert sent.shape[1] == (sum(columns for _, columns in sizes) if components is None else 5 if len(sizes) > 1 else 6)
    columns = torch.cat(list(server.tensors.values()), dim=1)
    assert torch.cdist(sent.T, columns.T).min() > 0.1  # no client's own column


@pytest.mark.parametrize(("fewest", "exact"), [({}, True), ({"fewest_clients": 3}, False)], ids=["by default", "3"])
def test_what_client_0_can_compute_of_the_others_kernels(fewest, exact):
    """It knows each mean that it was sent and its own kernels, and combines them as fits each kernel of another best.

    Clients are missing: in the opening round two answer, and in some rounds one.
    """
    part, server, known, others = RepresentationMean(**fewest), Message(), [], []
    torch.manual_seed(0)
    for answered in [(0, 1), (2,), (0, 1, 2, 3), (3,), (0, 2), (1,), (0, 1, 2), (0, 2, 3)]:
        a = {k: torch.randn(40, 3, dtype=torch.float64) for k in answered}
        known += [kernel_of(a[k]) for k in answered if k == 0]
        others += [kernel_of(a[k]) for k in answered if k != 0]
        replies = {k: Message({f"representation.{k}": a[k]}) for k in answered}
        server.tensors.update(part.aggregate(server, replies).tensors)
        known += [kernel_of(sent) for sent in sent_by(part, server).values()]
    basis = torch.stack([kernel.flatten() for kernel in known], dim=1)
    left = []
    for kernel in others:
        error = basis @ torch.linalg.lstsq(basis, kernel.flatten()[:, None], driver="gelsd").solution[:, 0]
        left.append(float((error - kernel.flatten()).norm() / kernel.norm()))
    assert (min(left) < 1e-6) == exact
    if not exact:
        assert min(left) > 0.4
        assert len(known) > 6  # means were sent
        assert sent_by(part, server)[FACTOR].isfinite().all()


def test_the_mean_of_as_many_clients_as_asked_for_is_that_of_all_and_of_more_than_there_are_is_refused():
    part, server = RepresentationMean(fewest_clients=2), state_of((20, 3), (20, 3), (20, 3))
    together = part.aggregate(Message(), {k: Message({name: a}) for k, (name, a) in enumerate(server.tensors.items())})
    assert torch.equal(sent_by(part, together)[FACTOR], sent_by(RepresentationMean(), server)[FACTOR])
    with pytest.raises(UserError, match="fewest_clients is 4, but there are only 3 clients"):
        RepresentationMean(fewest_clients=4).check(3)


@pytest.mark.parametrize("rank", [0, 1, 4, 7])
def test_the_canonical_factor_has_no_more_columns_than_the_rank(rank):
    """The others would hold rounding errors, which depend on the clients' representations."""
    torch.manual_seed(0)
    factor = torch.randn(12, rank) @ torch.randn(rank, 7)
    result = canonical_factor(factor)
    assert result.shape == factor.shape
    assert result.any(dim=0).tolist() == [True] * rank + [False] * (7 - rank)
    torch.testing.assert_close(result @ result.T, factor @ factor.T, atol=1e-5, rtol=1e-5)


def test_the_controls_are_ones_own_kernel_and_those_of_untrained_networks():
    server, new = state_of((20, 3), (20, 5)), Message({"representation.0": torch.ones(20, 3)})
    for k in (0, 1):
        own = sent_by(RepresentationMean(target="self"), server, k)
        assert torch.equal(own[FACTOR], server.tensors[f"representation.{k}"])
    assert RepresentationMean(target="untrained").aggregate(server, {0: new}).tensors == {}
    assert RepresentationMean(target="untrained").aggregate(Message(), {0: new}).tensors.keys() == new.tensors.keys()
    assert RepresentationMean().aggregate(server, {0: new}).tensors["representation.0"].sum() == 60


@pytest.mark.parametrize(
    ("target", "renew_every", "renewed"), [("peers", 2, [0, 2, 4]), ("self", 2, [0, 2, 4]), ("untrained", 1, [0])]
)
def test_kernels_are_sent_and_change_in_the_rounds_in_which_they_are_renewed_alone(target, renew_every, renewed, tiny):
    part = {"name": "representation_mean", "target": target, "renew_every": renew_every}
    done = train_rounds(build_federation(tiny(**ALIGNED | SMALL | {"aggregators": [part]})), 5)
    names = [f"representation.{k}" for k in range(3)]
    answers = [[name for reply in done.replies[r].values() for name in reply.tensors] for r in range(6)]
    assert answers == [names if r in renewed else [] for r in range(6)]
    sent = [done.sent[r][0].tensors for r in range(1, 6)]
    (form,) = sent[0]
    changes = [not torch.equal(a[form], b[form]) for a, b in itertools.pairwise(sent)]
    assert changes == [r in renewed for r in range(1, 5)]
    last = done.replies[renewed[-1]][1].tensors["representation.1"]
    assert torch.equal(done.server.tensors["representation.1"], last)


def test_half_whitening_gives_the_square_root_of_the_kernel_and_whitening_a_projection():
    torch.manual_seed(0)
    a = torch.randn(30, 6, dtype=torch.float64) @ torch.diag(torch.tensor([10.0, 5, 1, 1, 0.1, 0])).double()
    kernel = kernel_of(a @ whitening_matrix(a))
    torch.testing.assert_close(kernel @ kernel, a @ a.T, atol=1e-6, rtol=1e-6)
    projection = kernel_of(a @ whitening_matrix(a, -0.5))
    torch.testing.assert_close(projection @ a, a, atol=1e-6, rtol=1e-6)
    assert float(projection.trace()) == pytest.approx(5)


def test_shared_directions_are_those_that_most_representations_contain_whatever_their_size():
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(20, 6, dtype=torch.float64)).Q
    a, b, c = q[:, [0, 1, 2]] * torch.tensor([0.1, 1, 9]), q[:, [1, 0, 3]] * torch.tensor([0.1, 1, 9]), q[:, [0, 4, 5]]
    (first,) = shared_directions([a, b, c], 1).T
    torch.testing.assert_close(torch.outer(first, first), torch.outer(q[:, 0], q[:, 0]))  # it is in all three
    two = kernel_of(shared_directions([a @ torch.randn(3, 3).double(), b, c], 2))
    torch.testing.assert_close(two, torch.outer(q[:, 0], q[:, 0]) + 2 / 3 * torch.outer(q[:, 1], q[:, 1]))
    everything = kernel_of(shared_directions([a, b, c], 99))
    torch.testing.assert_close(everything, sum(x @ torch.linalg.pinv(x) for x in (a, b, c)) / 3)


def test_shared_directions_of_more_features_than_images_take_the_images_operations():
    """An eigendecomposition of 8,000 features would take minutes."""
    torch.manual_seed(0)
    wide, narrow = torch.randn(6, 8000).double(), torch.randn(6, 2).double()
    whole = kernel_of(shared_directions([wide, narrow], 99))
    torch.testing.assert_close(whole, 0.5 * torch.eye(6).double() + 0.5 * narrow @ torch.linalg.pinv(narrow))


def test_no_clients_kernel_is_more_of_the_sum_than_its_share():
    """Where a client's representations are 40 times as large, its kernel is 1600 times as large."""
    a, b, c = torch.eye(3), torch.eye(3).flip(0), 40 * torch.ones(3, 3)
    replies = {k: Message({f"representation.{k}": t}) for k, t in enumerate((a, b, c))}
    part, half = RepresentationMean(), partial(capped_images, share=0.5)
    lowered, reasons = part.limited(replies, half)
    assert list(reasons) == [2]
    assert "its kernel is 99.98 % of the sum of the clients' kernels, more than guard.largest_influence" in reasons[2]
    kernels = [kernel_of(lowered[k].tensors[f"representation.{k}"]).norm() for k in range(3)]
    torch.testing.assert_close(kernels[2], kernels[0] + kernels[1])
    assert lowered[0] is replies[0]
    assert part.limited(replies, partial(capped_images, share=1.0)) == (replies, {})
    assert part.limited({k: replies[k] for k in (0, 2)}, half) == ({k: replies[k] for k in (0, 2)}, {})


def test_with_views_a_client_sends_the_mean_over_random_views_of_each_public_image(tiny):
    part = {"name": "representation_mean", "views": 4, "layer": "encoder", "kernel": "half_whitened"}
    federation = build_federation(tiny(**{**ALIGNED, "aggregators": [part]}))
    method, client = federation.method, federation.client(0, Message())
    sent = method.client_round(client, Message(), 0).tensors["representation.0"]
    model, local = client.model.eval(), LocalRound(client, Message(), 0, 0, method.objective, method.augmentation)
    rows = torch.arange(30)
    views = [v for pair in (0, 1) for v in local.views(client.public_images, rows, "representation", pair)]
    assert not torch.equal(views[0], views[2])
    mean = torch.stack([model.represent(v, "encoder") for v in views]).mean(dim=0).detach()
    torch.testing.assert_close(sent, mean @ whitening_matrix(mean), atol=1e-3, rtol=1e-3)
    # by which the term whitens its batches
    plain = model.represent(normalize(client.public_images), "encoder").detach()
    torch.testing.assert_close(client.memory.tensors[WHITENING], whitening_matrix(plain), atol=1e-3, rtol=1e-3)
