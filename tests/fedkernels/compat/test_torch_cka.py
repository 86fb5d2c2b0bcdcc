"""The drop-in of torch_cka gives its values, and 0 where it raises."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedkernels import debiased_cka_pairwise
from fedkernels.compat.torch_cka import CKA
from tests.fedkernels.refusals import refusals


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)).double()


def loader(samples: int = 24, batch: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    images = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    return DataLoader(TensorDataset(images, torch.zeros(samples)), batch_size=batch)


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """The original multiplies by vectors of the default dtype; float32 is off by more than 1e-5."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:Dataloader for Model 2 is not given")
@pytest.mark.usefixtures("float64_by_default")
@pytest.mark.parametrize("layers", [None, ["0", "3"]])
def test_values_and_arguments_are_the_originals(layers):
    originals = pytest.importorskip("torch_cka", reason="torch_cka is not installed")
    given = {"model1_name": "A", "model2_name": "B", "model1_layers": layers, "model2_layers": layers}
    for name in ("__init__", "compare"):
        shown = (inspect.signature(getattr(one, name)).parameters.items() for one in (CKA, originals.CKA))
        assert [(key, one.default) for key, one in next(shown)] == [(key, one.default) for key, one in next(shown)]
    ours, original = (one(model(0), model(1), **given) for one in (CKA, originals.CKA))
    batches = loader()
    for one in (ours, original):
        with torch.no_grad():
            one.compare(batches)
    result, expected = ours.export(), original.export()
    if layers is None:
        # The original records layers as they finish, the whole model last, while it names the whole model first.
        expected["CKA"] = expected["CKA"].roll((1, 1), (0, 1))
    torch.testing.assert_close(result.pop("CKA"), expected.pop("CKA"), rtol=1e-5, atol=1e-5, check_dtype=False)
    assert result == expected


def test_a_model_is_like_itself_and_keeps_its_mode_and_no_hooks():
    network = model(0)
    ours = CKA(network, network)
    network.train()
    ours.compare(loader())
    assert network.training
    torch.testing.assert_close(ours.export()["CKA"].diagonal(), torch.ones(5))
    network.lists = nn.ModuleList()  # it never runs
    assert CKA(network, network).layers == [["", "0", "1", "2", "3"]] * 2
    assert not any(module._forward_hooks for module in network.modules())


def values_of(*loaders: object, first: nn.Module | None = None, layers: tuple[str, ...] = ("0", "3")) -> Tensor:
    """Of one network with itself, or of the networks `first` and model(0) with other layers."""
    ours = CKA(first or model(0), model(0), model1_layers=list(layers), model2_layers=["0", "3"])
    ours.compare(*loaders)
    return ours.export()["CKA"]


IMAGES = loader().dataset.tensors[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(TensorDataset(IMAGES), batch_size=8, shuffle=True),
        lambda: ((batch,) for batch in IMAGES.split(8)),
    ],
    ids=["shuffled", "generator"],
)
def test_one_loader_is_read_once_for_both(make):
    torch.testing.assert_close(values_of(make()).diagonal(), torch.ones(2))
    batches = make()
    torch.testing.assert_close(values_of(batches, batches).diagonal(), torch.ones(2))


class Several(nn.Module):
    """A layer with two names that runs twice, an activation in place, a tuple, a layer that does not run."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(36, 36)
        self.same = self.layer
        self.activation = nn.ReLU(inplace)
        self.tuple = nn.LSTM(36, 5, batch_first=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.same(self.layer(x.flatten(1))))
        return self.tuple(x[:, None])[0]


def test_layers_that_run_twice_change_in_place_or_return_a_tuple():
    with torch.no_grad():
        network = Several(inplace=False).double().eval()
        after = network.same(network.layer(IMAGES.flatten(1)))
        outputs = [after, after, network.tuple(after.relu()[:, None])[0].flatten(1)]
    ours = values_of([IMAGES], first=Several().double(), layers=("layer", "same", "tuple"))
    others = [model(0)[:1](IMAGES).flatten(1).detach(), model(0)(IMAGES).detach()]
    torch.testing.assert_close(ours, debiased_cka_pairwise(outputs, others).float(), rtol=1e-5, atol=1e-6)


def test_a_constant_layer_has_the_value_0():
    """The original divides 0 by 0 there and raises AssertionError."""
    constant = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    for parameter in constant.parameters():
        nn.init.zeros_(parameter)
    values = values_of(loader(), first=constant, layers=("0", "1"))
    assert values[0].all()
    assert not values[1].any()
    assert values_of([IMAGES * torch.nan]).isnan().all()


def of_two_devices() -> nn.DataParallel:
    parallel = nn.DataParallel(model(0))
    parallel.device_ids = [0, 1]
    return parallel


def between(**layers: list[str]) -> CKA:
    return CKA(model(0), model(1), **layers)


test_bad_input = refusals(
    (
        lambda: between(model2_layers=["9"]),
        ValueError,
        r"model2_layers must be names of named_modules\(\), got \['9'\]",
    ),
    (lambda: between(model1_layers=[]), ValueError, "model1_layers must name at least one layer"),
    (lambda: between().export(), ValueError, r"call compare\(\) before export\(\)"),
    (lambda: between().compare(loader(samples=3)), ValueError, "at least 4 samples, got 3"),
    (lambda: values_of([IMAGES, IMAGES], [IMAGES]), ValueError, "dataloader2 must have as many batches as dataloader1"),
    (lambda: values_of([IMAGES], [IMAGES[:8]]), ValueError, "dataloader2 must have batches of the same sizes"),
    (
        lambda: values_of([IMAGES], first=Several().double(), layers=("unused",)),
        ValueError,
        r"model1_layers must be layers that run in the forward pass, got \['unused'\]",
    ),
    (lambda: values_of([IMAGES], first=of_two_devices(), layers=("module.0",)), ValueError, r"give its \.module"),
)
