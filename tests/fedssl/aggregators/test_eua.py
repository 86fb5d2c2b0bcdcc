"""EUA, also with unit updates: by hand, Theorem 1, degenerate rounds; the solver has tests in fedkernels."""

import pytest
import torch

from fedssl.aggregators.eua import EUA, least_norm_step, moved_clients
from fedssl.messages import Message

WEIGHT = "online.encoder.weight"
MEAN, COUNT = "online.encoder.bn.running_mean", "online.encoder.bn.num_batches_tracked"


def reply(weight, samples=1.0, mean=0.0, count=0):
    tensors = {WEIGHT: torch.as_tensor(weight), MEAN: torch.tensor([mean]), COUNT: torch.tensor(count)}
    return Message(tensors, {"samples": float(samples)})


def server_at(weight):
    return Message(reply(weight).tensors)


def logged(state):
    """The part's metrics by name, without its own name."""
    return {name.removeprefix("eua_"): value for name, value in state.metrics.items() if name.startswith("eua_")}


UNIT_UPDATES = EUA(divide_updates_by="length")  # as in the released code

# By hand: theta_g = (0, 0), clients at (-1, 0) and (0, -2), so delta_0 = (1, 0), delta_1 = (0, 2), u = (1, 4).
HAND = {0: reply([-1.0, 0.0], samples=1, mean=4.0, count=10), 1: reply([0.0, -2.0], samples=3, mean=8.0, count=21)}


def test_eua_by_hand():
    """grad log u = 2 delta / u = (2, 0) and (0, 1): G = diag(4, 1), and 4 p^2 + (1 - p)^2 is least at p = 1/5.

    d* ~ 0.2 (2, 0) + 0.8 (0, 1) = 0.4 delta_0 + 0.4 delta_1: as a convex combination both count 1/2, so the new model
    is (-1/2, -1). Its deviations are 1/4 + 1 = 5/4 from each client: c_0 = (1 - 5/4) / 1, c_1 = (4 - 5/4) / 4.
    """
    server = server_at([0.0, 0.0])
    state = EUA().aggregate(server, HAND)
    assert torch.equal(server.tensors[WEIGHT], torch.zeros(2))  # not in place
    torch.testing.assert_close(state.tensors[WEIGHT], torch.tensor([-0.5, -1.0]))
    numbers = {"weight/0": 0.2, "weight/1": 0.8, "share/0": 0.5, "share/1": 0.5}
    rates = {"rate_min/global": -0.25, "rate_max/global": 0.6875}
    assert logged(state) == pytest.approx(numbers | rates)
    # by samples 1 : 3, whatever p: (4 + 3 * 8) / 4 = 7 and (10 + 3 * 21) / 4 = 18.25, a counter stays an integer
    assert state.tensors[MEAN] == 7.0
    assert state.tensors[COUNT].dtype == torch.int64
    assert state.tensors[COUNT] == 18


@pytest.mark.parametrize(
    ("part", "model"),
    [
        (EUA(step_size=0.2, phi=0.5), [-0.032, -0.064]),  # d* = eta / phi * (0.4, 0.8), and the step is eta d*
        # unit updates with p = (1/2, 1/2) at a fixed rate of 0.1, whatever the lengths
        (EUA(divide_updates_by="length", step_size=0.1, phi=0.1), [-0.05, -0.05]),
    ],
)
def test_a_printed_step_size_or_rate_by_hand(part, model):
    state = part.aggregate(server_at([0.0, 0.0]), HAND)
    torch.testing.assert_close(state.tensors[WEIGHT], torch.tensor(model))


def test_unit_updates_by_hand():
    """Unit updates (1, 0) and (0, 1): p = (1/2, 1/2). The lengths 1 and 2 have by samples 1 : 3 the mean 7/4, so the
    step is 7/4 (1/2, 1/2), in which delta_0 has 7/8 and delta_1 7/16.
    """
    state = UNIT_UPDATES.aggregate(server_at([0.0, 0.0]), HAND)
    torch.testing.assert_close(state.tensors[WEIGHT], torch.tensor([-7 / 8, -7 / 8]))
    assert (state.tensors[MEAN], state.tensors[COUNT]) == (7.0, 18)
    numbers = logged(state)
    assert (numbers["weight/0"], numbers["weight/1"]) == pytest.approx((0.5, 0.5))
    assert (numbers["share/0"], numbers["share/1"]) == pytest.approx((7 / 8, 7 / 16))


@pytest.mark.parametrize("part", [EUA(), EUA(step_size=0.3), UNIT_UPDATES])
def test_the_shares_are_those_of_the_new_model(part):
    start, ends = random_clients(5, 40, correlation=0.4, spread=0.4)
    state = part.aggregate(server_at(start), {k: reply(end) for k, end in enumerate(ends)})
    shares = torch.tensor([logged(state)[f"share/{k}"] for k in range(5)], dtype=torch.float64)
    torch.testing.assert_close(state.tensors[WEIGHT], start - shares @ (start - ends))


def random_clients(clients, entries, correlation, spread):
    """theta_g and the theta_k, float64: updates with a common part, and of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    deltas = (normal(clients, entries) + correlation * normal(entries)) * (spread * normal(clients, 1)).exp()
    start = normal(entries)
    return start, start - deltas


def test_theorem_1_all_deviations_change_at_one_rate():
    """Measured from the models before and after a short step, not from the Gram matrix."""
    start, ends = random_clients(6, 400, correlation=0.3, spread=0.2)
    replies = {k: reply(end) for k, end in enumerate(ends)}
    state = EUA(step_size=1e-3).aggregate(server_at(start), replies)
    weights = [logged(state)[f"weight/{k}"] for k in range(6)]
    assert min(weights) > 1e-3

    def deviations(model):
        return (model - ends).square().sum(1)

    rates = (deviations(start) - deviations(state.tensors[WEIGHT])) / deviations(start)
    assert rates.min() > 0
    assert float(rates.max() / rates.min()) == pytest.approx(1, abs=1e-4)
    assert logged(state)["rate_min/global"] == pytest.approx(float(rates.min()), rel=1e-6)
    assert logged(state)["rate_max/global"] == pytest.approx(float(rates.max()), rel=1e-6)


@pytest.mark.parametrize("part", [EUA(), UNIT_UPDATES])
def test_one_client_is_taken_as_it_is(part):
    state = part.aggregate(server_at([1.0, 2.0]), {4: reply([3.0, -1.0], samples=7, mean=5.0, count=3)})
    torch.testing.assert_close(state.tensors[WEIGHT], torch.tensor([3.0, -1.0]))
    assert logged(state)["weight/4"] == 1.0
    assert logged(state)["share/4"] == pytest.approx(1.0)


@pytest.mark.parametrize("part", [EUA(), UNIT_UPDATES, EUA(step_size=1.0)])
def test_where_no_client_moved_the_model_stays_and_weights_are_by_samples(part):
    start = [1.0, 2.0]
    state = part.aggregate(server_at(start), {0: reply(start, samples=1, mean=4.0), 2: reply(start, samples=3)})
    assert torch.equal(state.tensors[WEIGHT], torch.tensor(start))
    assert state.tensors[MEAN] == 1.0
    shares = {"share/0": 0.25, "share/2": 0.75}
    assert logged(state) == {"weight/0": 0.25, "weight/2": 0.75} | shares  # and no rates


@pytest.mark.parametrize("part", [EUA(), UNIT_UPDATES])
def test_a_client_that_did_not_move_has_no_weight(part):
    state = part.aggregate(server_at([0.0, 0.0]), HAND | {2: reply([0.0, 0.0], samples=100)})
    alone = part.aggregate(server_at([0.0, 0.0]), HAND)
    assert logged(state) == logged(alone) | {"weight/2": 0.0, "share/2": 0.0}
    assert torch.equal(state.tensors[WEIGHT], alone.tensors[WEIGHT])


def test_rounding_is_no_movement():
    gram = torch.diag(torch.tensor([1.0, 1e-13], dtype=torch.float64))
    assert moved_clients(gram).tolist() == [True, False]
    assert least_norm_step(gram, "squared_length", [1.0, 1.0])[0].tolist() == [1.0, 0.0]
