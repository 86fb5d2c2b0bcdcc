"""delta_gram and apply_deltas against flattened models and the formula in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedkernels import apply_deltas, delta_gram
from fedkernels.reference import apply_deltas as reference_of_steps
from fedkernels.reference import delta_gram as reference
from fedkernels.reference._chunks import chunks

SHAPES = [(4, 3, 3, 3), (4,), (), (7, 0), (300, 301)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def model(seed, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("clients", "scale"), [(1, 1e30), (7, 1e-30), (130, 1.0)])
def test_many_small_tensors_of_any_scale(clients, scale, monkeypatch):
    """In chunks that begin and end within tensors; squares of such entries leave the range of float32."""
    for name in ("_ENTRIES", "_ENTRIES_ON_CPU"):
        monkeypatch.setattr(reference, name, 1 << 12)
    shapes = [(n % 7,) for n in range(100)] + [(2500,), (3, 1)]
    start, *others = ([scale * tensor for tensor in model(k, shapes=shapes)] for k in range(clients + 1))
    flat = [torch.cat([tensor.double().flatten() for tensor in params]) for params in (start, *others)]
    deltas = flat[0] - torch.stack(flat[1:])
    gram, truth = delta_gram(start, others), deltas @ deltas.T
    norms = truth.diagonal().sqrt()
    assert ((gram - truth).abs() / (norms[:, None] * norms)).max() < 1e-13
    assert torch.equal(gram, gram.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_reference_as_it_is(dtype, narrow):
    """Autocast joins no tensors of the other half precision; a GPU always has the reference."""
    models = model(0, dtype), [model(1, dtype)]
    truth = reference.delta_gram(*models)
    with torch.autocast("cpu", narrow):
        assert torch.equal(reference.delta_gram(*models), truth)


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


@pytest.mark.parametrize("entries", [7, 1 << 20])
def test_equals_the_sum_client_by_client_to_the_last_bit(entries, monkeypatch):
    """In whatever dtypes, strides, and chunks, which begin and end within tensors.

    The compiled operator takes 512 entries at a time, and reads each version in its own dtype.
    """
    for name in ("_ENTRIES", "_ENTRIES_ON_CPU"):
        monkeypatch.setattr(reference_of_steps, name, entries)
    shapes = [(4, 3, 3), (5,), (), (2, 0), (1300,), (6, 4)]
    start, *clients = (
        [tensor.to(DTYPES[(n + k) % 4]) for n, tensor in enumerate(model(k, torch.float64, shapes))] for k in range(6)
    )
    start[-1] = start[-1].T.contiguous().T
    weights = torch.linspace(-0.3, 0.7, 5).double()
    truth = []
    for index, tensor in enumerate(start):
        step = torch.zeros_like(tensor, dtype=torch.float64)
        for weight, params in zip(weights, clients, strict=True):
            step += weight * (tensor.double() - params[index].double())
        truth.append((tensor.double() - step).to(tensor.dtype))
    apply_deltas(start, clients, weights)
    assert all(torch.equal(p, q) for p, q in zip(start, truth, strict=True))


def test_in_place_on_parameters():
    linear, client = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    places = [p.data_ptr() for p in linear.parameters()]
    loss = sum(p.square().sum() for p in linear.parameters())
    apply_deltas(list(linear.parameters()), [list(client.parameters())], [1.0])
    assert [p.data_ptr() for p in linear.parameters()] == places
    assert all(p.requires_grad and p.is_leaf for p in linear.parameters())
    torch.testing.assert_close(linear.weight, client.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.cpu_only(reason="copies share no memory")
def test_shared_memory_is_refused():
    flat = torch.arange(12.0)
    for start, clients, message in [
        ([flat], [[flat]], r"client_params\[0\]\[0\] must not share memory with global_params\[0\]"),
        ([flat[:6]], [[torch.ones(6)], [flat[5:11]]], r"client_params\[1\]\[0\] must not share memory"),
        ([flat[5:11]], [[torch.ones(6)], [flat[:6]]], r"client_params\[1\]\[0\] must not share memory"),
        ([flat[3:5]], [[flat[0:8:4]]], r"client_params\[0\]\[0\] must not share memory"),
        ([flat, flat], [[torch.ones(12)] * 2], r"global_params\[[01]\] must not share memory with global_params"),
        ([torch.ones(1).expand(4)], [[torch.ones(4)]], r"global_params\[0\] must not overlap itself"),
        ([flat.as_strided((3, 4), (2, 1))], [[torch.ones(3, 4)]], r"global_params\[0\] must not overlap itself"),
        ([flat.as_strided((2, 3), (4, 2))], [[torch.ones(2, 3)]], r"global_params\[0\] must not overlap itself"),
        ([flat.view(3, 4)[:, :3]], [[flat.view(3, 4)[:, 1:]]], r"client_params\[0\]\[0\] must not share memory"),
    ]:
        with torch.device("meta"), pytest.raises(ValueError, match=message):  # by default, and not for what is here
            apply_deltas(start, clients, [0.5] * len(clients))
    assert torch.equal(flat, torch.arange(12.0))


def test_neighbours_and_columns_in_one_storage_are_fine():
    flat, client = torch.arange(12.0), torch.full((6,), 7.0)
    apply_deltas([flat[:6], flat[6:]], [[client, client], [client, client]], [0.5, 0.5])
    assert flat.tolist() == [7.0] * 12
    both = torch.arange(12.0).view(2, 6)
    apply_deltas([both[:, :2], both[:, 2:4]], [[both[:, 4:]] * 2], [1.0])
    assert both.tolist() == [[4, 5, 4, 5, 4, 5], [10, 11, 10, 11, 10, 11]]
    steps = torch.arange(8.0).as_strided((2, 3), (3, 2))  # entries 0, 2, 4 and 3, 5, 7
    apply_deltas([steps], [[torch.zeros(2, 3)]], [1.0])
    assert steps.tolist() == [[0] * 3] * 2


@pytest.mark.cpu_only(reason="copies share no memory")
def test_weights_may_be_what_is_written():
    """They are those of the call's beginning, in whichever order the tensors are written."""
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    start = [weights, torch.zeros(2)]
    apply_deltas(start, [[torch.full((2,), 5.0)] * 2, [torch.full((2,), 9.0)] * 2], weights)
    assert start[0].tolist() == start[1].tolist() == [5, 5]


T = torch.ones(2, 3)


@pytest.mark.cpu_only(reason="weights on a GPU are not looked at")
@pytest.mark.parametrize(
    ("clients", "weights", "message"),
    [
        ([[T, T], [T, T]], [[1.0], [1.0, 2.0]], "weights must be a tensor .* or a list of K numbers"),
        ([[T, T.long()]], [1.0], r"client_params\[0\]\[1\] must be float16"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_written(clients, weights, message):
    start = [torch.zeros(2, 3), torch.zeros(2, 3)]
    with pytest.raises((TypeError, ValueError), match=message):
        apply_deltas(start, clients, weights)
    assert not any(tensor.any() for tensor in start)
