"""The self-test on emulated kernels: it passes without a fault, finds each planted one, and the reference serves."""

import importlib
import re
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fedkernels
from fedkernels import reference
from fedkernels.internal import first_contact, native, self_test_cases, self_test_outcomes
from fedkernels.self_test import FAILED, PASSED
from tests.cuda_on_cpu.emulated_card import EmulatedCard
from tests.cuda_on_cpu.emulation import ROOT, SANITIZED
from tests.cuda_on_cpu.planted_faults import CRASH, FAULTS, HANG, LAUNCH, FaultyCompiler, number_of

OPERATORS = sorted({*native.COMPILED} - native.CPU_ONLY)
SELF_TEST = importlib.import_module("fedkernels.self_test")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*verriding a previously registered kernel"),
    pytest.mark.skipif(SANITIZED, reason="margins around all memory find here what AddressSanitizer would"),
]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(function):
    x = randn(6, 4, seed=3).requires_grad_()
    return torch.autograd.grad(function(x, randn(6, 4, seed=4)), x)[0]


IMAGES = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)


def views_of_reference():
    of = reference.two_views
    options, key = fedkernels.ViewOptions(), fedkernels.ViewKey(1)
    return of.two_views(IMAGES, of.view_parameters(torch.arange(2), key, 4, 4, options), options)[0]


def transported(unbalanced_ot):
    return unbalanced_ot(randn(4, 3).sigmoid(), torch.ones(4), torch.ones(3), 0.8, 0.9)


# By operator: a call of the public function, and of the reference.
CALLS = {
    "client_weights": (
        lambda: fedkernels.client_weights(randn(3, 9) @ randn(3, 9).T),
        lambda: reference.client_weights.client_weights(randn(3, 9) @ randn(3, 9).T),
    ),
    "info_nce": (
        lambda: gradient(lambda x, y: fedkernels.info_nce(x, y, 0.3)),
        lambda: gradient(lambda x, y: reference.info_nce.info_nce(x, y, 0.3)),
    ),
    "linear_cka": (
        lambda: gradient(fedkernels.linear_cka),
        lambda: gradient(reference.linear_cka.linear_cka),
    ),
    "linear_cka_pairwise": (
        lambda: fedkernels.linear_cka_pairwise([randn(6, 4), randn(6, 3)], [randn(6, 2)]),
        lambda: reference.linear_cka.linear_cka_pairwise([randn(6, 4), randn(6, 3)], [randn(6, 2)]),
    ),
    "linear_cka_to_kernel": (
        lambda: gradient(lambda x, y: fedkernels.linear_cka_to_kernel(x, y @ y.T)),
        lambda: gradient(lambda x, y: reference.linear_cka.linear_cka_to_kernel(x, y @ y.T)),
    ),
    "nt_xent": (
        lambda: gradient(lambda x, y: fedkernels.nt_xent(x, y, 0.3)),
        lambda: gradient(lambda x, y: reference.nt_xent.nt_xent(x, y, 0.3)),
    ),
    "two_views": (
        lambda: fedkernels.two_views(IMAGES, torch.arange(2), fedkernels.ViewKey(1))[0],
        views_of_reference,
    ),
    "unbalanced_ot": (
        lambda: transported(fedkernels.unbalanced_ot),
        lambda: transported(reference.unbalanced_ot.unbalanced_ot),
    ),
}


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    if native.module is None:
        pytest.skip("the operators are declared by fedkernels._C, which is not compiled")
    return EmulatedCard(FaultyCompiler(tmp_path_factory.mktemp("faulty")))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDKERNELS_SELF_TEST", raising=False)
    return tmp_path


@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_without_a_fault_serve(card, operator):
    call, of_reference = CALLS[operator]
    truth = of_reference()
    with card.in_use() as called, warnings.catch_warnings():
        warnings.simplefilter("error")
        first = call()
        assert first_contact.known(operator, 0).passed
        of_test = len(called)
        second = call()
        assert 0 < len(called) - of_test < of_test
    torch.testing.assert_close(first, truth, rtol=1e-3, atol=1e-4)
    assert torch.equal(first, second)


@pytest.mark.parametrize("fault", [*FAULTS, LAUNCH], ids=lambda fault: fault.name)
def test_a_fault_is_found_and_the_reference_serves(card, fault, monkeypatch):
    """By the cases of its dtype alone, where it has one: the emulation is slow."""
    dtypes = re.findall(r"bfloat16|float16|float32|float64|tf32|steepest", fault.family)[:1]
    cases = [case for case in self_test_cases.cases_of(fault.operator) if {*dtypes} <= {*case.name.split(", ")}]
    monkeypatch.setattr(self_test_cases, "cases_of", lambda *_: iter(cases))
    call, of_reference = CALLS[fault.operator]
    truth = of_reference()
    with card.in_use() as called:
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
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "csrc/cuda").glob("*.[ch]*")]
    pattern = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^()]*(?:\([^()]*\)[^()]*)*\)\s+)?(\w+)\(")
    kernels = {name for text in texts for name in pattern.findall(text)}
    assert len(kernels) == sum(text.count("__global__ void") for text in texts)
    assert kernels == {fault.kernel for fault in FAULTS} | {"nothing"}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(HANG, "did not end within"), (CRASH, "ended with exit code -11"), (LAUNCH, "a multiple of 32")],
)
def test_a_child_process_finds_what_no_process_survives(card, fault, reason, monkeypatch, capsys):
    monkeypatch.setattr(
        SELF_TEST,
        "_child_command",
        lambda gpu, operators: [
            *(sys.executable, "-W", "ignore", "-m", "tests.cuda_on_cpu.emulated_card"),
            *(card.path, str(number_of(fault)), str(gpu), *operators),
        ],
    )
    monkeypatch.chdir(ROOT)
    with card.in_use() as called:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(native, "CUDA", frozenset({"client_weights", "linear_cka"}))
        results = {result.operator: result for result in fedkernels.self_test(time_limit=20 if fault is HANG else 600)}
        assert set(results) == native.CUDA
        for operator, result in results.items():
            assert result.card == "Emulated card"
            if operator == fault.operator:
                assert result.outcome == FAILED
                assert reason in result.reason
            else:
                assert (result.outcome, result.reason) == (PASSED, "")
        assert fault.operator in capsys.readouterr().out
        # The outcomes hold for this process, and are kept for others.
        first_contact.verdicts.clear()
        told = f"failed {fault.operator} "
        assert told in fedkernels.build_info()["cuda_self_test"]
        call, of_reference = CALLS[fault.operator]
        del called[:]
        with pytest.warns(UserWarning, match="slower reference"):
            assert torch.equal(call(), of_reference())
        assert not called


def test_no_test_is_started_in_a_graph(card):
    call, of_reference = CALLS["info_nce"]
    truth = of_reference()
    with card.in_use() as called:
        card.captured = True
        try:
            with pytest.warns(UserWarning, match="traced or captured"):
                assert torch.equal(call(), truth)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.equal(call(), truth)
        finally:
            card.captured = False
        assert not called
        call()
        assert called


def test_no_test_is_started_for_fake_tensors(card):
    with card.in_use() as called:
        with FakeTensorMode():
            x, y = torch.empty(6, 4), torch.empty(6, 4)
            with pytest.warns(UserWarning, match="traced or captured"):
                assert fedkernels.linear_cka(x, y).shape == ()
        assert not called
        assert not first_contact.verdicts


def test_no_test_is_started_while_tracing(card):
    x, y = randn(6, 4), randn(8, 4)
    truth = reference.info_nce.info_nce(x, y, 0.3)
    torch.compiler.reset()
    with card.in_use() as called:
        with pytest.warns(UserWarning, match="traced or captured"):
            value = torch.compile(lambda x, y: fedkernels.info_nce(x, y, 0.3), backend="eager", fullgraph=True)(x, y)
        assert not called
        torch.testing.assert_close(value, truth)
        fedkernels.info_nce(x, y, 0.3)
        del called[:]
        torch.compiler.reset()
        compiled = torch.compile(lambda x, y: fedkernels.info_nce(x, y, 0.3), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, y), truth)
        assert called == ["info_nce"]


def test_no_test_is_started_while_exporting(card):
    class Loss(torch.nn.Module):
        def forward(self, x, y):
            return fedkernels.info_nce(x, y, 0.3)

    x, y = randn(6, 4), randn(8, 4)
    with card.in_use() as called:
        with pytest.warns(UserWarning, match="traced or captured"):
            exported = torch.export.export(Loss(), (x, y), strict=False)
        assert not called
        assert not first_contact.verdicts
    torch.testing.assert_close(exported.module()(x, y), reference.info_nce.info_nce(x, y, 0.3))


def test_the_callers_settings_do_not_matter(card):
    """The test needs gradients, its own dtypes and no autocast."""
    with card.in_use(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        try:
            assert first_contact.test("linear_cka_to_kernel", 0)
        finally:
            torch.set_default_dtype(torch.float32)


def test_an_error_of_the_reference_is_no_verdict(card, monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(self_test_cases, "client_weights", no_memory)
    call, of_reference = CALLS["client_weights"]
    with card.in_use():
        with pytest.warns(UserWarning, match="could not be tested .*: OutOfMemoryError"):
            assert torch.equal(call(), of_reference())
        assert self_test_outcomes.load(self_test_outcomes.card_of(0), "client_weights") is None
