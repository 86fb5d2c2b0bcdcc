"""delta_gram against flattened models in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedkernels import delta_gram
from fedkernels.reference import delta_gram as reference
from fedkernels.reference._chunks import chunks

SHAPES = [(4, 3, 3, 3), (4,), (), (7, 0), (300, 301)]


def model(seed, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_flattening(start, clients):
    flat = [torch.cat([t.detach().double().flatten() for t in params]) for params in [start, *clients]]
    return torch.stack([torch.stack([(flat[0] - p) @ (flat[0] - q) for q in flat[1:]]) for p in flat[1:]])


DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.integers(1, 6),
    st.one_of(st.just(SHAPES), st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4)),
    st.sampled_from(DTYPES),
)
def test_equals_flattened_models(clients, shapes, dtype):
    start, *others = (model(k, dtype, shapes) for k in range(1 + clients))
    gram = delta_gram(start, others)
    assert gram.dtype == torch.float64
    torch.testing.assert_close(gram, by_flattening(start, others), rtol=1e-12, atol=1e-9)
    assert torch.equal(gram, gram.T)


def test_small_differences_of_large_weights_are_exact():
    """In float32 the sum of 100,000 squares of a difference in the last bits would be off in the fourth digit."""
    start = [torch.full((100_000,), 1000.0)]
    clients = [[torch.full((100_000,), 1000.0 + 2**-13)], [torch.full((100_000,), 1000.0 - 2**-12)]]
    unit = 100_000 * 2.0**-26
    assert delta_gram(start, clients).tolist() == [[unit, -2 * unit], [-2 * unit, 4 * unit]]


@pytest.mark.parametrize("clients", [1, 4, 5, 6, 10, 11, 23])
def test_any_number_of_clients(clients):
    """Large entries of one sign and one huge one in a tensor of a prime size: sums are as good as float64's."""
    generator = torch.Generator().manual_seed(clients)
    start, others = [torch.zeros(3_001)], [[10 + torch.rand(3_001, generator=generator)] for _ in range(clients)]
    others[0][0][2_999] = 1e6
    gram, truth = delta_gram(start, others), by_flattening(start, others)
    norms = truth.diagonal().sqrt()
    assert ((gram - truth).abs() / (norms[:, None] * norms)).max() < 1e-13
    assert torch.equal(gram, gram.T)


@pytest.mark.parametrize(("clients", "scale"), [(1, 1e30), (7, 1e-30), (130, 1.0)])
def test_many_small_tensors_of_any_scale(clients, scale, monkeypatch):
    """In chunks that begin and end within tensors; squares of such entries leave the range of float32."""
    for name in ("_ENTRIES", "_ENTRIES_ON_CPU"):
        monkeypatch.setattr(reference, name, 1 << 12)
    shapes = [(n % 7,) for n in range(100)] + [(2500,), (3, 1)]
    start, *others = ([scale * tensor for tensor in model(k, shapes=shapes)] for k in range(clients + 1))
    gram, truth = delta_gram(start, others), by_flattening(start, others)
    norms = truth.diagonal().sqrt()
    assert ((gram - truth).abs() / (norms[:, None] * norms)).max() < 1e-13


def test_the_reference_takes_as_many_calls_for_many_tensors():
    """A GPU would wait for each of them."""

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.count += not function.is_view
            return function(*arguments, **(options or {}))

    counts = []
    for tensors in (1, 200):
        start, *clients = (model(k, shapes=[(n % 5,) for n in range(tensors)] + [(3,)]) for k in range(11))
        with Calls() as calls:
            calls.count = 0
            reference.delta_gram(start, clients)
        counts.append(calls.count)
    assert counts[0] == counts[1] < 15


def test_a_chunk_is_on_one_device():
    tensors = [torch.ones(3), torch.ones(2, 2), torch.ones(5, device="meta"), torch.ones(1)]
    pieces = [[(piece.device.type, len(piece)) for piece in one] for (one,) in chunks([tensors], 6)]
    assert pieces == [[("cpu", 3), ("cpu", 3)], [("cpu", 1)], [("meta", 5)], [("cpu", 1)]]


def test_no_movement_is_zero_and_nan_is_seen():
    start = model(0)
    assert not delta_gram(start, [start, start]).any()
    broken = model(1)
    broken[1][0] = torch.nan
    assert delta_gram(start, [broken, start]).isnan().tolist() == [[True, True], [True, False]]
