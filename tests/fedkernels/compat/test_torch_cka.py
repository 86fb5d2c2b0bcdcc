"""The drop-in of torch_cka gives its values, and 0 where it raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedkernels.compat.torch_cka import CKA


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
def test_values_are_the_originals(layers):
    originals = pytest.importorskip("torch_cka", reason="torch_cka is not installed")
    given = {"model1_name": "A", "model2_name": "B", "model1_layers": layers, "model2_layers": layers}
    ours, original = (library.CKA(model(0), model(1), **given) for library in (_Ours, originals))
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


class _Ours:
    CKA = CKA


def test_a_constant_layer_has_the_value_0():
    """The original divides 0 by 0 there and raises AssertionError."""
    constant = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    nn.init.zeros_(constant[1].weight)
    nn.init.zeros_(constant[1].bias)
    ours = CKA(constant, model(0), model1_layers=["0", "1"], model2_layers=["3"])
    ours.compare(loader())
    values = ours.export()["CKA"]
    assert values.shape == (2, 1)
    assert values[1] == 0
    assert values[0] != 0


def test_a_model_is_like_itself_and_keeps_no_hooks():
    network = model(0)
    ours = CKA(network, network)
    ours.compare(loader())
    torch.testing.assert_close(ours.export()["CKA"].diagonal(), torch.ones(5))
    assert not any(module._forward_hooks for module in network.modules())


def test_bad_input():
    with pytest.raises(ValueError, match=r"model2_layers must be names of named_modules\(\), got \['9'\]"):
        CKA(model(0), model(1), model2_layers=["9"])
    with pytest.raises(ValueError, match=r"call compare\(\) before export\(\)"):
        CKA(model(0), model(1)).export()
    with pytest.raises(ValueError, match="at least 4 samples, got 3"):
        CKA(model(0), model(1)).compare(loader(samples=3))
