"""GradientCache beside one pass of the whole batch: gradients, memory, dropout, autocast, ranks, refusals."""

import weakref
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from fedkernels import GradientCache, clip_loss, distributed, nt_xent
from fedkernels.internal import two_passes
from tests.fedkernels.distributed.ranks import Ranks

FP64 = torch.float64


class Pair(NamedTuple):
    left: Tensor
    right: list[Any]


def encoder(dtype: torch.dtype = FP64, dropout: float = 0.0, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout))]
    return nn.Sequential(*layers).to(dtype)


def batch(seed: int, rows: int = 10, dtype: torch.dtype = FP64) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def nt_xent_loss(first: Tensor, second: Tensor) -> Tensor:
    return nt_xent(F.normalize(first, dim=1), F.normalize(second, dim=1), 0.3)


def plain_loss(first: Tensor, second: Tensor) -> Tensor:
    """Any function of the whole batch: this one is none of this package."""
    return (first @ second.T).logsumexp(dim=1).mean() + first.std(dim=0).sum() + first.square().mean() * second.mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("loss", [nt_xent_loss, plain_loss])
@pytest.mark.parametrize("size", [1, 4, 10, 100])
def test_values_and_gradients_are_those_of_the_whole_batch(loss, size):
    model, whole = encoder(), encoder()
    first, second = batch(0).requires_grad_(), batch(1)
    also_first = first.detach().clone().requires_grad_()
    value = loss(*GradientCache(model, size)(first, second))
    expected = loss(whole(also_first), whole(second))
    (3 * value).backward()
    (3 * expected).backward()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(first.grad, also_first.grad, rtol=1e-11, atol=1e-12)


def test_two_encoders_of_other_inputs_and_a_learned_scale():
    towers, whole = nn.ModuleList([encoder(), encoder(depth=1)]), nn.ModuleList([encoder(), encoder(depth=1)])
    scales = [torch.tensor(2.0, dtype=FP64, requires_grad=True) for _ in range(2)]
    images, texts = batch(0), {"pair": Pair(batch(1), [batch(2), "a word"]), "number": torch.tensor(2.0)}

    def text_tower(model: nn.Module, given: Any) -> Tensor:
        assert type(given["pair"]) is Pair
        assert given["pair"].right[1] == "a word"
        return model(given["pair"].left * given["number"] + given["pair"].right[0])

    cached = GradientCache(towers[0], 4)(images), GradientCache(lambda x: text_tower(towers[1], x), 3)(texts)
    for scale, embeddings in zip(scales, (cached, (whole[0](images), text_tower(whole[1], texts))), strict=True):
        clip_loss(*(F.normalize(x, dim=1) for x in embeddings), scale).backward()
    torch.testing.assert_close(gradients(towers), gradients(whole), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=1e-12, atol=1e-12)


class Watched(nn.Module):
    """An encoder that tells the most bytes of its own results that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.most, self.results = encoder(depth=8), 0, []
        for layer in self.layers:
            layer.register_forward_hook(self.count)

    def count(self, layer: nn.Module, given: Any, result: Tensor) -> None:
        self.results = [one for one in self.results if one() is not None] + [weakref.ref(result)]
        self.most = max(self.most, sum(one().nbytes for one in self.results))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_memory_is_that_of_one_mini_batch():
    """Also in the backward pass, and of both inputs together."""
    most = {}
    for name, rows, size in (("mini-batch", 8, 8), ("cached", 128, 8), ("whole", 128, 128)):
        model = Watched()
        if name == "cached":
            embeddings = GradientCache(model, size)(batch(0, rows), batch(1, rows))
            assert all(result() is None for result in model.results)
        else:
            embeddings = model(batch(0, rows)), model(batch(1, rows))
        plain_loss(*embeddings).backward()
        most[name] = model.most
    assert most["cached"] <= most["mini-batch"]
    assert most["whole"] == 16 * most["mini-batch"]


def test_both_passes_have_the_same_dropout_and_what_follows_draws_on():
    model, whole = encoder(dropout=0.5), encoder(dropout=0.5)
    torch.manual_seed(1)
    embeddings = GradientCache(model, 10)(batch(0), batch(1))  # one mini-batch for an input: it draws as the whole
    follows = torch.rand(1)
    plain_loss(*embeddings).backward()
    assert torch.rand(1) != follows
    torch.manual_seed(1)
    plain_loss(whole(batch(0)), whole(batch(1))).backward()
    assert torch.rand(1) == follows
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaled_loss(dtype):
    model, whole, seen = encoder(torch.float32), encoder(torch.float32), []
    model.register_forward_hook(lambda module, given, result: seen.append(result.dtype))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, enabled=dtype == torch.float16)
    inputs = [batch(0, dtype=torch.float32), batch(1, dtype=torch.float32)]
    with torch.autocast("cpu", dtype=dtype):
        embeddings = GradientCache(model, 4)(*inputs)
        loss = nt_xent_loss(*embeddings)
        expected = nt_xent_loss(*(whole(x).float() for x in inputs))
    for value in (loss, expected):
        scaler.scale(value).backward()
    assert seen == [dtype] * 12
    assert embeddings[0].dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=0.05, atol=0.01 * scaler.get_scale() / 16)


def test_an_ordinary_pass_within_the_same_autocast_keeps_its_gradients():
    """Autocast would give it the rounded weights of the pass that has no graph."""
    model, whole = encoder(torch.float32), encoder(torch.float32)
    x = batch(0, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        GradientCache(model, 4)(x)
        model(x).float().sum().backward()
        whole(x).float().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(whole))


def test_without_gradients_it_is_the_encoder():
    model = encoder()
    with torch.no_grad():
        embeddings = GradientCache(model, 4)(batch(0))
    assert not embeddings.requires_grad
    torch.testing.assert_close(embeddings, model(batch(0)))


def test_tensors_without_data():
    model = encoder().to("meta")
    embeddings = GradientCache(model, 4)(batch(0).to("meta"))
    embeddings.sum().backward()
    assert embeddings.shape == (10, 6)
    assert all(gradient.is_meta for gradient in gradients(model))


def test_an_encoder_that_changes_its_input_sees_it_unchanged_again():
    model, x = encoder(), batch(0)

    def in_place(given: dict[str, Tensor]) -> Tensor:
        given["written"] = model(given["x"].mul_(2))
        return given["written"]

    given = {"x": x.clone()}
    GradientCache(in_place, 4)(given).square().sum().backward()
    assert given.keys() == {"x"}
    assert torch.equal(given["x"], x)
    whole = encoder()
    whole(2 * x).square().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(whole))


def counted(model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, list[int]]:
    """The model in DistributedDataParallel, and the sizes of the buckets of gradients that it has exchanged so far."""
    parallel, sizes = DistributedDataParallel(model, **options), []

    def count(state, bucket):  # without types, as torch checks them
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    parallel.register_comm_hook(None, count)
    return parallel, sizes


def on_ranks() -> list[Tensor]:
    rank = dist.get_rank()
    model, exchanged = counted(encoder())
    views = GradientCache(model, 3)(batch(rank, 7), batch(10 + rank, 7))
    distributed.nt_xent(*(F.normalize(view, dim=1) for view in views), 0.3).backward()
    assert sum(exchanged) == sum(weight.numel() for weight in model.parameters())
    return gradients(model)


def test_on_several_ranks_it_is_the_whole_batch_and_exchanges_gradients_once(ranks: Ranks):
    results = ranks(on_ranks)
    whole = encoder()
    views = [torch.cat([batch(begin + rank, 7) for rank in range(len(results))]) for begin in (0, 10)]
    nt_xent_loss(*map(whole, views)).backward()
    for found in results:
        torch.testing.assert_close(found, gradients(whole), rtol=1e-10, atol=1e-12)


def test_inputs_live_as_long_as_the_graph():
    x = batch(0)
    held, loss = weakref.ref(x), GradientCache(encoder(), 4)(x).sum()
    loss.backward(retain_graph=True)
    del x
    assert held() is not None
    loss.backward()
    assert held() is None
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("what", ["weights of the encoder", "inputs"])
def test_weights_and_inputs_that_change_between_the_passes_are_an_error(what):
    model, x = encoder(), batch(0)
    loss = GradientCache(model, 4)(x).sum()
    with torch.no_grad():
        (x if what == "inputs" else next(model.parameters())).add_(1)
    with pytest.raises(RuntimeError, match=rf"{what} were changed .* call backward\(\) before the optimizer's step"):
        loss.backward()


def test_second_derivatives_and_forward_mode_are_refused():
    """Autograd would take them for zero."""
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward mode"):
        GradientCache(encoder(), 4)(forward_ad.make_dual(batch(0), batch(1)))
    loss = GradientCache(encoder(), 4)(batch(0)).square().sum()
    with pytest.raises(RuntimeError, match=r"no second derivative .* leave create_graph False"):
        loss.backward(create_graph=True)


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = (nn.Linear(6, 6, dtype=FP64) for _ in range(2))

    def encode(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return factor * self.layer(x)


@pytest.mark.parametrize("wrap", [lambda method: method, lambda method: partial(partial(method, factor=2.0))])
def test_the_device_of_a_methods_weights_is_known(wrap, monkeypatch):
    """Also where the batch is on another one. Other weights of its module may change, as a momentum encoder's do."""
    seen, of_tensors = [], two_passes.get_device_states
    model = WithMethod()
    monkeypatch.setattr(two_passes, "get_device_states", lambda *given: seen.extend(given) or of_tensors(*given))
    loss = GradientCache(wrap(model.encode), 10)(batch(0)).sum()
    assert any(tensor is model.layer.weight for tensor in seen)
    with torch.no_grad():
        model.other.weight.add_(1)
    loss.backward()


def test_weights_and_inputs_of_the_inference_mode():
    with torch.inference_mode():
        frozen, x = encoder().requires_grad_(False), batch(0)
    last = encoder()
    expected = torch.autograd.grad(last(frozen(x)).sum(), [*last.parameters()])
    GradientCache(nn.Sequential(frozen, last), 4)(x).sum().backward()
    torch.testing.assert_close(gradients(last), [*expected])


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ((), ValueError, "inputs must hold at least one input of the encoder, got none"),
        ((batch(0), "word"), ValueError, r"inputs\[1\] must hold tensors with one row for each sample, got none rows"),
        (([batch(0), batch(1, 9)],), ValueError, r"inputs\[0\] must hold .* got \[9, 10\] rows"),
        ((batch(0)[:0],), ValueError, r"got \[0\] rows"),
        ((2 * batch(0).requires_grad_(),), ValueError, "must not be computed from tensors that require a gradient"),
        ((batch(0),), TypeError, "encoder must return one torch.Tensor, got dict"),
        ((batch(1),), ValueError, r"encoder must return 4 rows for 4 samples, got shape \[\]"),
    ],
)
def test_refusals(given, error, match):
    def wrong(x: Tensor) -> Any:
        return {"x": x} if torch.equal(x, batch(0)[:4]) else x.sum()

    with pytest.raises(error, match=match):
        GradientCache(wrong, 4)(*given)
    for size, message in ((0, "at least 1, got 0"), (2.5, "an integer, got float"), (True, "an integer, got bool")):
        with pytest.raises((TypeError, ValueError), match=f"mini_batch_size must be {message}"):
            GradientCache(wrong, size)
