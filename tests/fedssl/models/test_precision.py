"""Networks compute in bfloat16 or float16; what reads their outputs, and all that is kept, stays float32."""

import copy
import re
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedssl.client import LocalRound
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models import precision
from fedssl.models.model import Model
from fedssl.models.precision import Precision, check_precision, contrastive_dtype, networks_compute_in
from fedssl.objectives import fedx, moco_v3, simclr
from fedssl.objectives.base import Step
from fedssl.recipe.overrides import recipe_names
from fedssl.recipe.recipe import Recipe
from fedssl.regularizers import global_distillation
from fedssl.regularizers.base import Regularizer, StepLoss
from fedssl.training import train_locally
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.test_shipped_recipes import small

pytestmark = pytest.mark.usefixtures("one_thread")  # networks this small are slower on several
CPU = torch.device("cpu")


def one_step(recipe: Recipe) -> tuple[Model, dict[str, float], dict[str, Tensor]]:
    """Client 0 after a round of one step: its model, what it logged, and the gradients of the step."""
    federation = build_federation(recipe)
    opened = train_rounds(federation, 0)
    client, sent = federation.client(0, opened.clients[0]), federation.method.broadcast(opened.server, [0], 1)[0]
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        gradients.update({name: p.grad for name, p in client.model.named_parameters() if p.grad is not None})

    handle = register_optimizer_step_pre_hook(keep)
    reply, _ = federation.method.counted_round(client, sent, 1, most_steps=1)
    handle.remove()
    return client.model, reply.metrics, gradients


#: a recipe without training, and those whose first step is that of another one
LEFT_OUT = re.compile("scratch|centralised_.*|local_only|fedema|fedu|ssfl|l_dawa|fedu2_without_.*|prog_fedssl")


@pytest.mark.parametrize("name", [name for name in recipe_names() if not LEFT_OUT.fullmatch(name)])
def test_a_step_of_each_recipe_in_bfloat16_is_that_in_float32_but_for_rounding(name):
    """Losses agree within 2 %: bfloat16 has 8 significant bits, and a product's terms are summed in float32."""
    exact_model, exact, exact_gradients = one_step(small(name))
    model, rounded, gradients = one_step(small(name, "training.precision=bfloat16"))
    for loss in ("loss", "total_loss"):
        assert rounded[loss] == pytest.approx(exact[loss], rel=0.02, abs=0.02)
    assert rounded["loss"] != exact["loss"]
    assert gradients.keys() == exact_gradients.keys()
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    state, expected = (
        {name: (tensor.dtype, tensor.stride()) for name, tensor in each.state_dict().items()}
        for each in (model, exact_model)
    )
    assert state == expected
    one, other = (torch.cat([g.flatten() for g in of.values()]) for of in (gradients, exact_gradients))
    assert torch.cosine_similarity(one, other, dim=0) > 0.95


class SeesFloat32(Regularizer):
    """Checks what a term is given and what it gets from networks: the model's own, its target's and a copy's."""

    seen: Any

    def start_round(self, local: LocalRound) -> StepLoss:
        model = local.client.model
        other = copy.deepcopy(model)

        def term(step: Step) -> Tensor:
            assert not torch.is_autocast_enabled("cpu")  # products of losses are float32 too
            images = step.views[0]
            outputs = [model.represent(images), *model.target_of_views((images,)), other.encoder(images)]
            tensors = [step.loss, *step.representations, *step.projections, *step.predictions, *outputs]
            self.seen.extend(tensor.dtype for tensor in tensors)
            return step.loss.new_zeros(())

        return term


def training(noisy: Any, **options: Any) -> Recipe:
    return noisy(**AVERAGED, training={"local_epochs": 1, "batch_size": 8, **options})


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_losses_and_terms_get_float32_from_networks_that_compute_in_less(name, noisy):
    """Channels come last in training alone; float16's scaled loss runs on the CPU too, where the options refuse it."""
    recipe = training(noisy)
    federation = build_federation(recipe)
    client = federation.client(0, Message())
    inner: list[tuple[torch.dtype, bool]] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        inner.append((output.dtype, output.is_contiguous(memory_format=torch.channels_last)))

    client.model.encoder.blocks[3].register_forward_hook(note)  # type: ignore[union-attr,index]
    before = client.model.online_state()
    local = LocalRound(client, Message(), 1, 0, recipe.objective, recipe.augmentation)
    seen: list[torch.dtype] = []
    options = recipe.training.model_copy(update={"precision": name})
    train_locally(local, options, [SeesFloat32(name="sees", seen=seen)], rounds=1)
    assert set(seen) == {torch.float32}
    assert set(inner) == {(getattr(torch, name), True)}
    assert 0 < local.logged()["loss"] < 4
    after = client.model.online_state()
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any((after[n] - before[n]).abs().max() > 1e-4 for n in after if n.endswith("weight"))
    # what follows the training, such as evaluation, computes in float32 and in the usual layout again
    inner.clear()
    images = torch.randn(4, 1, 8, 8)
    outside = client.model.eval().represent(images)
    with networks_compute_in(client.model, "float32"):
        torch.testing.assert_close(client.model.represent(images), outside, rtol=1e-4, atol=1e-5)
    assert inner == [(torch.float32, False), (torch.float32, True)]


def test_a_failed_forward_pass_leaves_no_autocast(noisy):
    model = build_federation(noisy()).new_model(0)
    with pytest.raises(RuntimeError), networks_compute_in(model, "bfloat16"):
        model.encoder(torch.randn(4, 5, 8, 8))
    assert not torch.is_autocast_enabled("cpu")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_float16_needs_cuda(noisy):
    message = r"training\.precision float16 needs a CUDA device, got device cpu: use training\.precision=bfloat16$"
    with pytest.raises(UserError, match=message):
        build_federation(training(noisy, precision="float16"))
    check_precision("float16", torch.device("cuda"))


def test_contrastive_losses_take_shorter_rows_on_cuda_alone():
    cuda = torch.device("cuda", 1)
    shorter = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    for name in get_args(Precision):
        assert (contrastive_dtype(name, cuda), contrastive_dtype(name, CPU)) == (shorter.get(name), None)


@pytest.mark.parametrize(("name", "losses"), [("fedsimclr", 1), ("fedmoco_v3", 2), ("fedx", 2)])
def test_contrastive_losses_of_rounded_rows_are_float32s_but_for_rounding(name, losses, monkeypatch):
    """As on CUDA. The networks compute in float32, so that the rows alone are rounded."""
    _, exact, exact_gradients = one_step(small(name))
    rows: list[torch.dtype] = []

    def noting(loss: Any) -> Any:
        return lambda first, *rest: rows.append(first.dtype) or loss(first, *rest)

    for module in (simclr, moco_v3, fedx, global_distillation):
        for loss in {"nt_xent", "info_nce"} & vars(module).keys():
            monkeypatch.setattr(module, loss, noting(getattr(module, loss)))
    monkeypatch.setattr(precision, "contrastive_dtype", lambda *_: torch.bfloat16)
    model, rounded, gradients = one_step(small(name))
    assert rows == [torch.bfloat16] * losses
    assert model.rows_dtype is None
    assert 0 < abs(rounded["loss"] / exact["loss"] - 1) < 1e-3
    one, other = (torch.cat([g.flatten() for g in of.values()]) for of in (gradients, exact_gradients))
    assert torch.cosine_similarity(one, other, dim=0) > 0.999
