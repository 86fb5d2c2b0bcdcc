"""The operators of csrc/ops/linear_cka_cuda.cpp, made of emulated kernels."""

import ctypes

import torch

from tests.cuda_on_cpu.emulation import Array, arrays, poison

PREPARE, COMBINE = "linear_cka_prepare.cu", "linear_cka_combine.cu"
MATRICES = 16  # CKA_MATRICES of csrc/cuda/linear_cka.h


class Matrices(ctypes.Structure):
    """struct CKAMatrices of csrc/cuda/linear_cka.h."""

    _fields_ = (
        ("matrices", Array * MATRICES),
        ("widths", ctypes.c_int64 * MATRICES),
        *((name, ctypes.c_int64) for name in ("count", "problems", "rows")),
        *((name, ctypes.c_bool) for name in ("centered", "wide")),
    )


class Products(ctypes.Structure):
    """struct CKAProducts."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("own", "other")),
        *((name, ctypes.c_int64) for name in ("problems", "rows", "x_width", "y_width")),
        *((name, ctypes.c_bool) for name in ("samples", "wide")),
        *((name, ctypes.c_void_p) for name in ("scales", "values", "of_x", "of_y")),
    )


class EmulatedOperators:
    """The operators' C++, in Python; each call runs in both orders of the threads. `calls` names those called."""

    def __init__(self, prepare, combine):
        self.prepare, self.combine, self.calls = prepare, combine, []

    def linear_cka_prepare(self, matrices, centered):
        self.calls.append("prepare")
        assert len(matrices) <= MATRICES
        widths, rows = [one.shape[-1] for one in matrices], matrices[0].shape[-2]
        problems, wide = matrices[0].shape[:-2].numel(), any(one.dtype == torch.float64 for one in matrices)
        given = Matrices(count=len(matrices), problems=problems, rows=rows, centered=centered, wide=wide)
        for index, (one, array) in enumerate(zip(matrices, arrays(matrices), strict=True)):
            assert one.is_contiguous()
            given.matrices[index], given.widths[index] = array, one.shape[-1]

        def solve(call):
            z = poison(problems, rows, sum(widths), dtype=torch.float64 if wide else torch.float32)
            scales = poison(problems, len(matrices))
            memory = poison(self.prepare.ask("cuda_linear_cka_prepare_doubles", ctypes.byref(given)))
            call("cuda_linear_cka_prepare", ctypes.byref(given), z, scales, memory, None)
            return z, scales

        return self.prepare.results(solve)

    def linear_cka_combine(self, own, other, scales, samples, x_gradient, y_gradient):
        self.calls.append("combine")
        assert own.is_contiguous()
        assert other.is_contiguous()
        problems, x_width, y_width = len(own), own.shape[2], other.shape[2]

        def solve(call):
            values = poison(problems, dtype=own.dtype)
            of_x, of_y = (
                poison(problems, width if samples else x_width + y_width, width, dtype=own.dtype) if wanted else None
                for width, wanted in ((x_width, x_gradient), (y_width, y_gradient))
            )
            data = [None if one is None else one.data_ptr() for one in (of_x, of_y)]
            products = Products(
                *(own.data_ptr(), other.data_ptr(), problems, own.shape[1], x_width, y_width, samples),
                *(own.dtype == torch.float64, scales.data_ptr(), values.data_ptr(), *data),
            )
            memory = poison(self.combine.ask("cuda_linear_cka_combine_doubles", ctypes.byref(products)))
            call("cuda_linear_cka_combine", ctypes.byref(products), memory, None)
            return values, *(values.new_empty(0) if one is None else one for one in (of_x, of_y))

        return self.combine.results(solve)
