"""Two views that pass at a time give what they give one after the other; and which networks keep an order."""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from fedssl import training
from fedssl.augmentations.random_views import RandomViews
from fedssl.client import LocalRound
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.model import Model, untouched_running_statistics
from fedssl.models.stages import StagedEncoder
from fedssl.models.view_threads import ViewThreads
from fedssl.regularizers.base import Regularizer, StepLoss
from fedssl.training import train_locally
from tests.fedssl.conftest import AVERAGED

HEADS = {"hidden_features": 16, "output_features": 8}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2  # as it was before each round
    torch.set_num_threads(before)


@pytest.fixture
def seen(monkeypatch) -> list[int]:
    """The views' passes at a time: a 1 for each pair in two threads, a 0 for each pair in one."""
    pairs: list[int] = []
    passes = ViewThreads.passes

    def counted(self: ViewThreads, *args: Any) -> Any:
        pairs.append(int(self.at_a_time))
        return passes(self, *args)

    monkeypatch.setattr(ViewThreads, "passes", counted)
    training.STEP_COSTS.clear()  # or else the first step is not counted, and runs in two threads
    return pairs


class Length(Regularizer):
    """Reads the first view's representations and the second one's predictions or projections."""

    def start_round(self, local: LocalRound) -> StepLoss:
        return lambda step: (
            step.representations[0].norm(dim=1).mean() + (step.predictions or step.projections)[1].mean()
        )


def model_and_views(noisy: Any) -> tuple[Model, tuple[Tensor, Tensor]]:
    """A BYOL model that trains, and two views of different brightness."""
    model = build_federation(recipe_of(noisy)).new_model(0).train()
    return model, (torch.randn(8, 1, 8, 8), 3 * torch.randn(8, 1, 8, 8) + 1)


def trained(recipe: Any, double: bool = False, change: Any = None, terms: Any = ()) -> LocalRound:
    """Client 0 after its first round; in float64 the order of sums does not matter, and views may be float32."""
    client = build_federation(recipe).client(0, Message())
    if double:
        client.model.double()
        for networks in (client.model.online, client.model.target):
            if "encoder" in networks:
                networks["encoder"].register_forward_pre_hook(lambda network, inputs: (inputs[0].double(),))
    if change is not None:
        change(client.model)
    local = LocalRound(client, Message(), 1, recipe.seed, recipe.objective, recipe.augmentation)
    train_locally(local, recipe.training, terms, rounds=1)
    return local


def recipe_of(noisy: Any, name: str = "byol", **options: Any) -> Any:
    training = {"local_steps": 3, "batch_size": 8, **options}
    return noisy(**AVERAGED, objective={"name": name} | HEADS, training=training)


@pytest.mark.parametrize(("name", "frozen"), [("byol", False), ("byol", True), ("simclr", False), ("moco_v3", False)])
def test_a_round_in_float64_is_that_of_one_thread(name, frozen, noisy, two_threads, seen):
    """Weights, target network, running statistics, losses; with terms, and with an encoder in evaluation mode."""
    recipe, terms = recipe_of(noisy, name), [Length(name="length")]

    def change(model: Model) -> None:
        if frozen:
            model.encoder.requires_grad_(False).eval()

    threads = trained(recipe, True, change, terms)
    networks = 2 if threads.client.model.target else 1
    assert seen == [0] * networks + [1] * 2 * networks  # the first step is counted, in this thread
    torch.set_num_threads(1)
    alone = trained(recipe, True, change, terms)
    torch.set_num_threads(2)
    assert len(seen) == 3 * networks
    state, expected = threads.client.model.state_dict(), alone.client.model.state_dict()
    torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-10, check_stride=True)
    assert threads.logged() == pytest.approx(alone.logged(), rel=1e-10)
    counts = {int(n) for entry, n in state.items() if entry.endswith("num_batches_tracked")}
    assert counts == ({0, 6} if frozen else {6})


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_rounds_are_bit_identical_whether_a_step_is_counted_or_not(precision, noisy, two_threads, seen):
    """A counted step runs one view after the other in this thread."""
    recipe = recipe_of(noisy, precision=precision)
    counted, other = trained(recipe), trained(recipe)
    assert seen.count(0) == 2
    torch.testing.assert_close(counted.client.model.state_dict(), other.client.model.state_dict(), rtol=0, atol=0)
    assert counted.logged() == other.logged()


def test_the_second_view_waits_for_nothing_of_the_first_and_their_order_stays(noisy, two_threads):
    """The first view's pass ends only once the second one's has; running statistics still see the first one first."""
    model, views = model_and_views(noisy)
    expected = copy.deepcopy(model)
    outputs = expected.outputs_of_views(views)
    done, order = threading.Event(), []

    def wait(network: nn.Module, inputs: Any, output: Tensor) -> None:
        if threading.current_thread() is threading.main_thread():
            assert done.wait(60)
        else:
            done.set()
        order.append(threading.current_thread() is threading.main_thread())

    model.online["predictor"].register_forward_hook(wait)
    with model.views_at_a_time():
        results = model.outputs_of_views(views)
    assert order == [False, True]
    torch.testing.assert_close(results, outputs)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_frozen_outputs_are_kept_for_their_own_view(noisy, two_threads):
    """The first view is still in its first layer when the second one has passed; both then serve the target network."""
    plain, views = model_and_views(noisy)
    encoder = StagedEncoder(plain.encoder)
    model = recipe_of(noisy).objective.build(encoder, 10).train()
    encoder.use(active=[2, 3], frozen=[0, 1])
    model.target["encoder"].use(active=[2, 3], frozen=[0, 1])
    model.target.requires_grad_(False)
    expected = copy.deepcopy(model)
    outputs = expected.outputs_of_views(views), expected.target_of_views(views)
    encoder.share_frozen_outputs(model.target["encoder"])
    done = threading.Event()

    def wait(module: nn.Module, inputs: Any, output: Tensor) -> None:
        assert threading.current_thread() is not threading.main_thread() or done.wait(60)

    def passed(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            done.set()

    encoder.switches(0)[0].register_forward_hook(wait)
    model.online["predictor"].register_forward_hook(passed)
    with model.views_at_a_time():
        results = model.outputs_of_views(views), model.target_of_views(views)
    torch.testing.assert_close(results, outputs)


def test_passes_that_must_leave_the_running_statistics_do(noisy, two_threads, seen):
    model, views = model_and_views(noisy)
    before = copy.deepcopy(model.state_dict())
    with model.views_at_a_time():
        with untouched_running_statistics(model):
            model.outputs_of_views(views)
        model.eval()
        in_evaluation = model.outputs_of_views(views)
    assert seen == [1, 1]
    assert all(torch.equal(tensor, before[entry]) for entry, tensor in model.state_dict().items())
    torch.testing.assert_close(in_evaluation, model.outputs_of_views(views))


def test_an_unused_output_and_a_frozen_network_have_no_gradient(noisy, two_threads):
    model, views = model_and_views(noisy)
    model.encoder.requires_grad_(False)
    with model.views_at_a_time():
        representations, projections, _ = model.outputs_of_views(views)
        assert [outputs[0].requires_grad for outputs in (representations, projections)] == [False, True]
        projections[1].square().sum().backward()
    assert all(p.grad is None for part in ("encoder", "predictor") for p in model.online[part].parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.online["projector"].parameters())


def test_an_error_of_the_second_view_is_raised_and_nothing_is_left_changed(noisy, two_threads):
    model, (view, _) = model_and_views(noisy)
    with pytest.raises(RuntimeError, match="5 channels"), model.views_at_a_time():
        model.outputs_of_views((view, torch.randn(8, 5, 8, 8)))
    assert model.view_threads is None
    with model.views_at_a_time() as threads:
        assert threads is not None
        assert copy.deepcopy(model).view_threads is None  # a copy of a model that trains has none


@pytest.mark.parametrize(("from_global_generators", "symmetric"), [(False, True), (True, True), (False, False)])
def test_next_views_come_from_the_second_thread(from_global_generators, symmetric, noisy, two_threads, monkeypatch):
    """Unless they come from the global generators, which this thread may use, or this thread has all threads."""
    in_main: list[bool] = []
    views = RandomViews.views

    def seen_views(self: RandomViews, *args: Any) -> Any:
        in_main.append(threading.current_thread() is threading.main_thread())
        return views(self, *args)

    monkeypatch.setattr(RandomViews, "views", seen_views)
    monkeypatch.setattr(RandomViews, "uses_global_generators", from_global_generators)
    training.STEP_COSTS.clear()
    recipe = recipe_of(noisy, local_steps=4)
    recipe = recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"symmetric": symmetric})})
    trained(recipe)
    # after the first step, whose count belongs to this thread
    expected = [True, True] + [from_global_generators or not symmetric] * (len(in_main) - 2)
    assert len(in_main) == 4
    assert in_main == expected


@pytest.mark.parametrize(
    ("layer", "at_a_time"),
    [
        *((layer, False) for layer in (nn.Dropout(0.5), nn.AlphaDropout(0.5), DropPath(0.1))),
        (nn.BatchNorm2d(3, momentum=None), False),  # a mean over all batches
        (nn.InstanceNorm2d(3, track_running_stats=True), False),
        *((layer, True) for layer in (nn.Dropout(0.0), DropPath(0.0), nn.InstanceNorm2d(3), nn.BatchNorm2d(3))),
    ],
)
def test_passes_that_depend_on_those_before_follow_one_another(layer, at_a_time, noisy, two_threads):
    model, _ = model_and_views(noisy)
    model.online["projector"].append(layer)
    with model.views_at_a_time() as threads:
        assert (threads is not None) == at_a_time


def test_a_second_derivative_is_refused(noisy, two_threads):
    """In a sum with another term autograd would take it for zero."""
    model, views = model_and_views(noisy)
    with model.views_at_a_time():
        outputs = model.outputs_of_views(views)
        weights = list(model.online.parameters())
        loss = sum(output.square().mean() for view in outputs for output in view)
        with pytest.raises(UserError, match="no second derivative"):
            torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
