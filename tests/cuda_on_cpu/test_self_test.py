"""The self-test on emulated kernels: it passes without a fault, finds each planted one, and the reference serves."""

import re
import warnings

import pytest
import torch

import fedkernels
from fedkernels.internal import first_contact, native, self_test_cases
from fedkernels.internal.self_test_outcomes import PASSED, Result
from tests.cuda_on_cpu.emulated_card import CARD
from tests.cuda_on_cpu.emulation import CUDA, SANITIZED
from tests.cuda_on_cpu.planted_faults import FAULTS, LAUNCH, number_of
from tests.fedkernels.test_cuda import randn

OPERATORS = sorted({*native.COMPILED} - native.CPU_ONLY)

pytestmark = pytest.mark.skipif(SANITIZED, reason="margins around all memory find here what AddressSanitizer would")


def gradient(function):
    x = randn(6, 4, seed=3).requires_grad_()
    return torch.autograd.grad(function(x, randn(6, 4, seed=4)), x)[0]


IMAGES = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)


# By operator a call of a public function that it serves.
CALLS = {
    "client_weights": lambda: fedkernels.client_weights(randn(3, 9) @ randn(3, 9).T),
    "info_nce": lambda: gradient(lambda x, y: fedkernels.info_nce(x, y, 0.3)),
    "linear_cka": lambda: gradient(fedkernels.linear_cka),
    "linear_cka_pairwise": lambda: fedkernels.linear_cka_pairwise([randn(6, 4), randn(6, 3)], [randn(6, 2)]),
    "linear_cka_to_kernel": lambda: gradient(lambda x, y: fedkernels.linear_cka_to_kernel(x, y @ y.T)),
    "nt_xent": lambda: gradient(lambda x, y: fedkernels.nt_xent(x, y, 0.3)),
    "sigmoid_loss": lambda: gradient(lambda x, y: fedkernels.sigmoid_loss(x, y, 2.0, -1.0)),
    "similarity_logsumexp": lambda: gradient(lambda x, y: fedkernels.clip_loss(x, y, 2.0)),
    "two_views": lambda: fedkernels.two_views(IMAGES, torch.arange(2), fedkernels.ViewKey(1))[0],
    "unbalanced_ot": lambda: fedkernels.unbalanced_ot(randn(4, 3).sigmoid(), torch.ones(4), torch.ones(3), 0.8, 0.9),
}


def by_reference(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "operator", lambda *_: None)
        return call()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDKERNELS_SELF_TEST", raising=False)
    return tmp_path


@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_without_a_fault_serve(card, operator):
    call = CALLS[operator]
    truth = by_reference(call)
    with card.in_use(operator) as called, warnings.catch_warnings():
        warnings.simplefilter("error")
        first = call()
        assert first_contact.known(0)[operator].outcome == PASSED
        of_test = len(called)
        second = call()
        assert 0 < len(called) - of_test < of_test
    torch.testing.assert_close(first, truth, rtol=1e-3, atol=1e-4)
    assert torch.equal(first, second)


@pytest.mark.parametrize("fault", [*FAULTS, LAUNCH], ids=lambda fault: fault.name)
def test_a_fault_is_found_and_the_reference_serves(card, fault, monkeypatch):
    """By the cases of its dtype or shape alone, where it has one: the emulation is slow."""
    family = re.match(r"(b?float\d\d(, \[.+\])?)?", fault.family)[0]
    cases = [case for case in self_test_cases.cases_of(fault.operator) if case.name.startswith(family)]
    monkeypatch.setattr(self_test_cases, "cases_of", lambda *_: iter(cases))
    call = CALLS[fault.operator]
    truth = by_reference(call)
    with card.in_use(fault.operator) as called:
        card.plant(number_of(fault))
        told = (
            rf"fedkernels.{fault.operator} runs on its slower reference on cuda:0 \(Emulated card\).*: \w*float.*Please"
        )
        with pytest.warns(UserWarning, match=told) as warned:
            first = call()
        assert len([one for one in warned if "self-test" in str(one.message)]) == 1
        del called[:]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = call()
        assert not called
    assert torch.equal(first, truth)
    assert torch.equal(second, truth)


def test_each_kernel_has_a_fault():
    texts = [path.read_text(encoding="utf-8") for path in CUDA.glob("*.[ch]*")]
    pattern = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^()]*(?:\([^()]*\)[^()]*)*\)\s+)?(\w+)\(")
    kernels = {name for text in texts for name in pattern.findall(text)}
    assert len(kernels) == sum(text.count("__global__ void") for text in texts)
    assert kernels == {fault.kernel for fault in FAULTS} | {"nothing"}


def traced(call):
    return torch.compile(call, backend="eager", fullgraph=True)


def exported(call):
    class Loss(torch.nn.Module):
        def forward(self, x, y):
            return call(x, y)

    return torch.export.export(Loss(), (randn(6, 4), randn(8, 4)), strict=False).module()


@pytest.mark.parametrize("kind", [traced, exported])
def test_a_first_use_may_be_traced(card, kind):
    def test(gpu, operators, time_limit):
        return {name: Result(CARD.name, name, PASSED) for name in operators}

    def loss(x, y):
        return fedkernels.info_nce(x, y, 0.3)

    inputs = randn(6, 4), randn(8, 4)
    truth = by_reference(lambda: loss(*inputs))
    torch.compiler.reset()
    with card.in_use("info_nce", test=test) as called, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        value = kind(loss)(*inputs)
        assert called[0] == "info_nce"
    torch.testing.assert_close(value, truth)
