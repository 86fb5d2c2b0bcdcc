"""The operators of csrc/ops/linear_cka_large_cuda.cpp, made of emulated kernels, and inputs for their tests."""

import ctypes

import torch

from tests.cuda_on_cpu.emulation import Array, arrays, integers, poison

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PREPARE, COMBINE = "linear_cka_large_prepare.cu", "linear_cka_large_combine.cu"
MATRICES = 16  # CKA_MATRICES of csrc/cuda/linear_cka_large.h


class Matrices(ctypes.Structure):
    """struct CKAMatrices of csrc/cuda/linear_cka_large.h."""

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


class ToKernelProducts(ctypes.Structure):
    """struct CKAToKernelProducts."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("z", "product", "own")),
        *((name, ctypes.c_int64) for name in ("problems", "rows", "width", "side")),
        *((name, ctypes.c_bool) for name in ("wide", "gradient")),
        *((name, ctypes.c_void_p) for name in ("scales", "values")),
    )


class EmulatedOperators:
    """The operators' C++, in Python; each call runs in both orders of the threads."""

    def __init__(self, prepare, combine):
        self.prepare, self.combine = prepare, combine

    def describe(self, matrices, centered, wide):
        given = Matrices(count=len(matrices), rows=matrices[0].shape[-2], centered=centered, wide=wide)
        given.problems = matrices[0].shape[:-2].numel()
        for index, (one, array) in enumerate(zip(matrices, arrays(matrices), strict=True)):
            assert one.is_contiguous()
            given.matrices[index], given.widths[index] = array, one.shape[-1]
        return given

    def linear_cka_prepare(self, matrices, centered):
        wide = any(one.dtype == FP64 for one in matrices)
        widths = [one.shape[-1] for one in matrices]
        problems, rows = matrices[0].shape[:-2].numel(), matrices[0].shape[-2]

        def solve(call):
            z = poison(problems, rows, sum(widths), dtype=FP64 if wide else FP32)
            scales = poison(problems, len(matrices))
            for start in range(0, len(matrices), MATRICES):
                given = self.describe(matrices[start : start + MATRICES], centered, wide)
                memory = poison(self.prepare.ask("cuda_linear_cka_prepare_doubles", ctypes.byref(given)))
                to = ctypes.c_void_p(z.data_ptr() + sum(widths[:start]) * z.element_size())
                of_scales = ctypes.c_void_p(scales.data_ptr() + start * 8)
                call("cuda_linear_cka_prepare", ctypes.byref(given), to, sum(widths), of_scales, memory, None)
            return z, scales

        return self.prepare.results(solve)

    def linear_cka_prepare_to_kernel(self, x, kernel, centered):
        given = self.describe([x, kernel], centered, FP64 in (x.dtype, kernel.dtype))

        def solve(call):
            dtype = FP64 if given.wide else FP32
            z, scales = poison(given.problems, *x.shape[-2:], dtype=dtype), poison(given.problems, 4)
            hkh = poison(given.problems, *kernel.shape[-2:], dtype=dtype) if centered else z.new_empty(len(z), 0, 0)
            memory = poison(self.prepare.ask("cuda_linear_cka_prepare_to_kernel_doubles", ctypes.byref(given)))
            call("cuda_linear_cka_prepare_to_kernel", ctypes.byref(given), z, hkh, scales, memory, None)
            return z, scales, hkh

        return self.prepare.results(solve)

    def linear_cka_combine(self, own, other, scales, samples, x_gradient, y_gradient):
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
                *(own.dtype == FP64, scales.data_ptr(), values.data_ptr(), *data),
            )
            memory = poison(self.combine.ask("cuda_linear_cka_combine_doubles", problems))
            call("cuda_linear_cka_combine", ctypes.byref(products), memory, None)
            return values, *(values.new_empty(0) if one is None else one for one in (of_x, of_y))

        return self.combine.results(solve)

    def linear_cka_combine_to_kernel(self, product, own, z, scales, gradient):
        def solve(call):
            values, of_product, of_own = poison(len(z), dtype=z.dtype), product.clone(), own.clone()
            products = ToKernelProducts(
                *(one.data_ptr() for one in (z, of_product, of_own)),
                *(*z.shape, own.shape[1], z.dtype == FP64, gradient, scales.data_ptr(), values.data_ptr()),
            )
            memory = poison(self.combine.ask("cuda_linear_cka_combine_doubles", len(z)))
            call("cuda_linear_cka_combine_to_kernel", ctypes.byref(products), memory, None)
            return values, of_product, of_own

        assert all(one.is_contiguous() and one.dtype == z.dtype for one in (product, own, z))
        values, of_product, of_own = self.combine.results(solve)
        product.copy_(of_product)
        own.copy_(of_own)
        return values

    def linear_cka_squares(self, product, lengths):
        assert product.is_contiguous()
        assert sum(lengths) == product.numel()

        def solve(call):
            squares = poison(len(lengths))
            memory = poison(self.combine.ask("cuda_linear_cka_squares_doubles", len(lengths)))
            wide = product.dtype == FP64
            call("cuda_linear_cka_squares", product, wide, integers(lengths), len(lengths), squares, memory, None)
            return squares

        return self.combine.results(solve)


def matrix(*shape, seed=0, dtype=FP64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=FP64) + 0.3).to(dtype)


def pair(rows, x_width, y_width, batch=(), dtypes=(FP32, FP32), seed=0):
    """With something in common, and columns that are not centred."""
    x, y = matrix(*batch, rows, x_width, seed=seed), matrix(*batch, rows, y_width, seed=seed + 1) - 0.5
    shared = min(x_width, y_width)
    y[..., :shared] += x[..., :shared]
    return x.to(dtypes[0]), y.to(dtypes[1])


def near(found, truth, z, tolerance):
    """A gradient: two terms of the size of 1 / |z| may cancel."""
    sizes = truth.abs().amax(dim=(-2, -1)) + 1 / z.double().norm(dim=(-2, -1))
    assert ((found.double() - truth).abs() <= tolerance * sizes[..., None, None]).all()
