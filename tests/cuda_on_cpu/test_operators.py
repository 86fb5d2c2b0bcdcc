"""Edges of the operators by their own tests of tests/fedkernels, on the emulated kernels in both orders."""

# ruff: noqa: F401  (pytest collects here what is imported)

import sys
from collections.abc import Iterator

import pytest

from fedkernels import two_views
from tests.cuda_on_cpu.bindings import Bindings
from tests.cuda_on_cpu.emulation import ORDERS
from tests.fedkernels.conftest import by_reference
from tests.fedkernels.test_client_weights import (
    test_deficient_rank,
    test_degenerate_grams,
    test_duplicate_clients_share,
    test_the_smallest_and_the_largest_numbers,
)
from tests.fedkernels.test_linear_cka import (
    test_a_zero_matrix_has_cka_and_gradient_zero_and_hides_nothing_that_is_not_finite,
    test_equals_the_definition,
    test_scale_does_not_matter,
)
from tests.fedkernels.test_two_views import (
    KEY,
    STRONG,
    assert_near,
    numbers,
    random_bytes,
    test_other_formats_hold_the_same_views,
    test_strides_do_not_matter,
)
from tests.fedkernels.test_unbalanced_ot import test_the_case_where_the_printed_step_divides_by_zero


@pytest.fixture(autouse=True, params=ORDERS, ids=["first order", "reversed order"])
def emulated(request: pytest.FixtureRequest, bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        sys.modules["fedkernels.client_weights"], "_MOST_ON_CUDA", 128
    )  # the CPU is no other device here
    with bindings.on_cuda(request.param):
        yield


@pytest.mark.parametrize("shape", [(8, 3, 5, 47), (4, 5, 9, 11), (20, 3, 2, 2)])
def test_small_views_and_more_channels(shape):
    given = random_bytes(*shape), numbers(shape[0], -5), KEY, STRONG
    assert_near(two_views(*given), by_reference()(two_views)(*given))
