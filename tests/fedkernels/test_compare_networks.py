"""compare: what its hooks keep, what it restores, and what it refuses."""

import sys

import pytest
import torch
from torch import nn

from fedkernels import compare, debiased_cka_pairwise, linear_cka_pairwise
from tests.fedkernels.refusals import refusals


class Pair(nn.Module):
    """Returns a tuple, in which an integer comes first."""

    def forward(self, x):
        return torch.arange(len(x)), x * 2, x


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()
        self.twice = nn.Identity()
        self.unused = nn.Identity()
        self.counting = nn.Identity()

    def forward(self, x):
        value = self.pair(x)[1]
        self.counting(torch.arange(3))
        return self.twice(self.twice(value))


def network(seed=0, width=12):
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 36, width)
    return nn.Sequential(*layers)


IMAGES = torch.randn(70, 1, 8, 8, generator=torch.Generator().manual_seed(7))
LAYERS = ["0", "1", "4"]
OF_PIXELS = nn.Sequential(nn.Flatten(0, 2), nn.Flatten())


def outputs(model):
    """Of the layers LAYERS in evaluation mode."""
    kept = []
    model.eval()
    with torch.no_grad():
        x = IMAGES
        for index, layer in enumerate(model):
            x = layer(x)
            if str(index) in LAYERS:
                kept.append(x.flatten(1).clone())
    return kept


def batches(size=35):
    return [(part, "a label") for part in IMAGES.split(size)]


@pytest.mark.parametrize("estimator", ["exact", "exact_debiased", "minibatch"])
def test_equals_cka_of_all_outputs(estimator):
    a, b = network(1), network(2, width=5)
    xs, ys = outputs(a), outputs(b)
    truth = linear_cka_pairwise(xs, ys, True) if estimator == "exact" else debiased_cka_pairwise(xs, ys)
    loader = batches(70 if estimator == "minibatch" else 20)
    result = compare(a.train(), b.train(), loader, LAYERS, estimator)
    torch.testing.assert_close(result.matrix, truth, rtol=1e-4, atol=1e-5)
    assert result.layers_a == result.layers_b == LAYERS


def test_a_network_with_itself_and_the_first_floating_tensor_of_a_tuple():
    model = network(1)
    assert len({compare(model, model, batches(), LAYERS) for _ in range(2)}) == 2  # each is like itself alone
    matrix = compare(model, model, batches(), LAYERS).matrix
    torch.testing.assert_close(matrix.diagonal(), torch.ones(3))
    torch.testing.assert_close(matrix, matrix.T)
    matrix = compare(Second(), nn.Sequential(nn.Flatten()), batches(), (["pair"], ["0"])).matrix
    torch.testing.assert_close(matrix, torch.ones(1, 1))


def test_networks_that_share_a_layer():
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 3))
    second = nn.Sequential(nn.Flatten(), nn.ReLU(), first[1])
    result = compare(first, second, batches(70), (["1", "2"], ["2"]))
    with torch.no_grad():
        xs = [first[:2](IMAGES), first(IMAGES)]
        truth = debiased_cka_pairwise(xs, [second(IMAGES)])
    torch.testing.assert_close(result.matrix, truth, rtol=1e-4, atol=1e-5)
    tied = nn.Sequential(nn.Flatten(), nn.Identity())
    tied.same = tied[1]  # a second name of a module; as the last one it runs again
    with pytest.raises(ValueError, match="'same' of model_a ran more than once"):
        compare(tied, first, batches(70), (["same"], ["1"]))


def test_modes_and_hooks_are_restored():
    a, b = network(1).train(), network(2)
    a[3].eval()
    with pytest.raises(ValueError, match="at least 4 samples"):
        compare(a, b, batches(3), LAYERS)
    assert a.training
    assert not a[3].training
    assert b.training
    assert not any(module._forward_hooks for module in (*a.modules(), *b.modules()))


def test_inputs_as_tensors_and_mappings():
    a, b = network(1), network(2)
    truth = compare(a, b, batches(), LAYERS).matrix
    for kind in (lambda x: x, lambda x: {"input": x}, lambda x: ({"input": x}, "a label")):
        assert torch.equal(compare(a, b, map(kind, IMAGES.split(35)), LAYERS).matrix, truth)


test_bad_input_is_named = refusals(
    (lambda: compare(network(), network(), [], ["4"]), ValueError, "at least one batch, got none"),
    (lambda: compare(network(), network(), batches(), []), ValueError, "at least one layer"),
    (lambda: compare(network(), network(), batches(), "4"), TypeError, "layers must be a list of names"),
    (lambda: compare(network(), 3, batches(), ["4"]), TypeError, "model_b must be a torch.nn.Module, got int"),
    (
        lambda: compare(network(), Second(), batches(), (["4"], ["pairs"])),
        ValueError,
        "model_b has no layer .*pair",
    ),
    (lambda: compare(network(), network(), batches(), ["4"], "mean"), ValueError, "estimator must be one of"),
    (lambda: compare(Second(), Second(), batches(), ["twice"]), ValueError, "'twice' of model_a ran more than"),
    (lambda: compare(Second(), Second(), batches(), ["unused"]), ValueError, "'unused' of model_a did not run"),
    (lambda: compare(Second(), Second(), batches(), ["counting"]), ValueError, "must return a floating tensor"),
    (lambda: compare(network(), network(), [()], ["0"]), ValueError, "a batch must begin .* got an empty tuple"),
    (lambda: compare(OF_PIXELS, network(), batches(), ["0"]), ValueError, "layers must return one row for each"),
    (lambda: compare(network(), network(), [IMAGES[:0]], ["0"]), ValueError, "'0' of model_a must return at least"),
)


def test_without_matplotlib_a_heat_map_says_what_to_install(tmp_path, monkeypatch):
    result = compare(network(1), network(2), batches(), LAYERS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        result.heat_map(tmp_path / "similarity.png")
    assert not any(tmp_path.iterdir())


def test_a_heat_map_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    compare(network(1), network(2), batches(), LAYERS).heat_map(tmp_path / "similarity.png")
    assert (tmp_path / "similarity.png").read_bytes().startswith(b"\x89PNG")
