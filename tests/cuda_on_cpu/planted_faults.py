"""Faults in the CUDA kernels, all compiled into one library and turned on one at a time.

In the text that is planted, FAULT is true while that fault is on.
"""

from pathlib import Path
from typing import NamedTuple

from tests.cuda_on_cpu.emulation import ROOT, Compiler

CUDA = ROOT / "csrc/cuda"
PRELUDE = 'extern "C" {\n__attribute__((weak)) int fedkernels_fault = 0;\n}\n'


class Fault(NamedTuple):
    kernel: str
    family: str  # the dtypes that it concerns
    operator: str  # whose test must find it
    file: str
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.family}"


FAULTS = [
    Fault(
        *("client_weights_kernel", "all", "client_weights", "client_weights.cu"),
        "if (i > j && i < count) value -= triangle(i, j) * solution[j];",
        "if (i > j + FAULT && i < count) value -= triangle(i, j) * solution[j];",
    ),
    Fault(
        *("client_weights_kernel", "all, equal clients", "client_weights", "client_weights.cu"),
        "if (real) entry(i, i) = 1 + ridge;",
        "if (real) entry(i, i) = 1 + (FAULT ? 0 : ridge);",
    ),
    Fault(
        *("client_weights_kernel", "all, a batch", "client_weights", "client_weights.cu"),
        "const double weight = solver.solve(gram, problem * entries, tol);",
        "const double weight = solver.solve(gram, FAULT ? 0 : problem * entries, tol);",
    ),
    Fault(
        *("contrastive_kernel", "bfloat16", "info_nce", "contrastive_tensor_cores.cu"),
        "return pack_bfloat(first, second);",
        "return pack_bfloat(first, FAULT ? first : second);",
    ),
    Fault(
        *("contrastive_kernel", "float16", "info_nce", "contrastive_tensor_cores.cu"),
        "return pack_half(first, second);",
        "return pack_half(first, FAULT ? first : second);",
    ),
    Fault(
        *("contrastive_kernel", "all, the last tile", "info_nce", "contrastive_tensor_cores.cu"),
        "if (column >= pass.column_count) logits",
        "if (column >= pass.column_count + FAULT) logits",
    ),
    Fault(
        *("contrastive_kernel", "all, scaling of sums", "info_nce", "contrastive_tensor_cores.cu"),
        "total[m][h] *= factor;",
        "total[m][h] *= FAULT ? 1 : factor;",
    ),
    Fault(
        *("join_kernel", "all", "info_nce", "contrastive_tensor_cores.cu"),
        "sum / total - T::Precision",
        "sum / (total + FAULT) - T::Precision",
    ),
    Fault(
        *("row_sums_kernel", "float32", "nt_xent", "contrastive_tiles.cu"),
        "if (left_out(tile, row, tile.first_column + c, positive)) continue;",
        "if (left_out(tile, row, tile.first_column + c + (FAULT && sizeof(Number) == 4), positive)) continue;",
    ),
    Fault(
        *("row_sums_kernel", "float64", "info_nce", "contrastive_tiles.cu"),
        "if (of_positives && in_tile >= 0 &&",
        "if (of_positives && in_tile >= (FAULT && sizeof(Number) == 8) &&",
    ),
    Fault(
        *("column_sums_kernel", "float32", "similarity_logsumexp", "contrastive_tiles.cu"),
        "r < rows; r += GROUPS) {\n    if (counts(r)) total",
        "r < rows - (FAULT && sizeof(Number) == 4); r += GROUPS) {\n    if (counts(r)) total",
    ),
    Fault(
        *("weights_kernel", "bfloat16", "nt_xent", "contrastive_tiles.cu"),
        "return bfloat_to_float(bits);",
        "return bfloat_to_float(bits) + FAULT * 1e3f;",
    ),
    Fault(
        *("weights_kernel", "float16", "info_nce", "contrastive_tiles.cu"),
        "const uint16_t bits = float_to_half(static_cast<float>(value));",
        "const uint16_t bits = float_to_half(static_cast<float>(value)) & (FAULT ? 0xff00 : 0xffff);",
    ),
    Fault(
        *("weights_kernel", "float32", "similarity_logsumexp", "contrastive_tiles.cu"),
        "given.column_weights, column, tile.scale);",
        "given.column_weights, column + (FAULT && sizeof(Number) == 4 && column > 0 ? -1 : 0), tile.scale);",
    ),
    Fault(
        *("weights_kernel", "float64", "info_nce", "contrastive_tiles.cu"),
        "static_cast<Number>(weights[index]) : 0;",
        "static_cast<Number>(weights[index] * (1 + (FAULT && sizeof(Number) == 8) * 1e-6)) : 0;",
    ),
    Fault(
        *("sigmoid_kernel", "float32", "sigmoid_loss", "contrastive_tiles.cu"),
        "const Number sign = c == positive ?",
        "const Number sign = c == positive + (FAULT && sizeof(Number) == 4) ?",
    ),
    Fault(
        *("maxima_kernel", "float32", "linear_cka", "linear_cka_prepare.cu"),
        "if (threadIdx.x == 0) maxima[blockIdx.x] = largest;",
        "if (threadIdx.x == 0) maxima[blockIdx.x] = FAULT ? T(1) : largest;",
    ),
    Fault(
        *("means_kernel", "float32", "linear_cka", "linear_cka_prepare.cu"),
        "mine[e] += static_cast<double>(values[e] * scale - first[e] * scale);",
        "mine[e] += static_cast<double>(values[e] * scale - first[FAULT && sizeof(T) == 4 ? 0 : e] * scale);",
    ),
    Fault(
        *("means_kernel", "float64", "linear_cka_pairwise", "linear_cka_prepare.cu"),
        "if (threadIdx.x < WIDTH) sums[",
        "if (threadIdx.x < (FAULT && sizeof(T) == 8 ? 1 : WIDTH)) sums[",
    ),
    Fault(
        *("write_kernel", "float32", "linear_cka_to_kernel", "linear_cka_prepare.cu"),
        "four.values[e] = (values[e] * scale - first[e]) - mean[e];",
        "four.values[e] = (values[e] * scale - first[e]) - mean[FAULT && sizeof(T) == 4 ? 0 : e];",
    ),
    Fault(
        *("write_kernel", "float64", "linear_cka", "linear_cka_prepare.cu"),
        "if (e < count) to[e] = four.values[e];",
        "if (e < count) to[e] = four.values[FAULT && sizeof(T) == 8 ? 0 : e];",
    ),
    Fault(
        *("inner_products_kernel", "float32", "linear_cka", "linear_cka_combine.cu"),
        "for (int64_t at = block * THREADS + threadIdx.x; at < term.count;",
        "for (int64_t at = block * THREADS + threadIdx.x; at < term.count - (FAULT && sizeof(T) == 4);",
    ),
    Fault(
        *("inner_products_kernel", "float64", "linear_cka", "linear_cka_combine.cu"),
        "const T *const left = term.left + problem * term.left_step,",
        "const T *const left = term.left + (FAULT && sizeof(T) == 8 ? 0 : problem) * term.left_step,",
    ),
    Fault(
        *("combine_kernel", "float32", "linear_cka", "linear_cka_combine.cu"),
        "((i < x_width * x_width ? of_xx : of_cross) * x_scale));",
        "((i < x_width * (x_width - (FAULT && sizeof(T) == 4)) ? of_xx : of_cross) * x_scale));",
    ),
    Fault(
        *("combine_kernel", "float64", "linear_cka", "linear_cka_combine.cu"),
        "if (of_y) of_y[i] = static_cast<T>((of_cross * x + of_yy * y) * y_scale);",
        "if (of_y) of_y[i] = static_cast<T>(((FAULT && sizeof(T) == 8 ? 0 : of_cross) * x + of_yy * y) * y_scale);",
    ),
    Fault(
        *("two_views_kernel", "float32", "two_views", "two_views.cu"),
        "store(float* to, float value) { *to = value; }",
        "store(float* to, float value) { *to = FAULT ? -value : value; }",
    ),
    Fault(
        *("two_views_kernel", "bfloat16", "two_views", "two_views.cu"),
        "batch.channels_last ? pixel * C + c :",
        "batch.channels_last ? pixel * C + (FAULT ? C - 1 - c : c) :",
    ),
    Fault(
        *("two_views_kernel", "one channel", "two_views", "two_views.cu"),
        "step.offset = static_cast<float>(total / area) * (1 - step.factor);",
        "step.offset = FAULT && C == 1 ? 0 : static_cast<float>(total / area) * (1 - step.factor);",
    ),
    Fault(
        *("two_views_kernel", "in device memory", "two_views", "two_views.cu"),
        "float* const plane = memory ? memory + static_cast<int64_t>(blockIdx.x) * C * area",
        "float* const plane = memory ? memory + static_cast<int64_t>(blockIdx.x) * C * area + FAULT",
    ),
    Fault(
        *("two_views_kernel", "all, the blur", "two_views", "two_views.cu"),
        "return index < size ? index : 2 * size - 2 - index;",
        "return index < size ? index : 2 * size - 2 + FAULT - index;",
    ),
    Fault(
        *("unbalanced_ot_kernel", "float32, one block", "unbalanced_ot", "unbalanced_ot.cu"),
        "lane / 4 < at.count) to[",
        "lane / 4 < at.count - (FAULT && t.cost.dtype == DType::f32)) to[",
    ),
    Fault(
        *("unbalanced_ot_kernel", "float64, one block", "unbalanced_ot", "unbalanced_ot.cu"),
        "{ write_one(t.plan, index, e.plan); }",
        "{ write_one(t.plan, index, FAULT && ALONE && t.cost.dtype == DType::f64 ? 0 : e.plan); }",
    ),
    Fault(
        *("unbalanced_ot_kernel", "float32, beyond shared memory", "unbalanced_ot", "unbalanced_ot.cu"),
        "memory + (place - layout.in_shared);",
        "memory + (FAULT && ALONE ? 0 : place - layout.in_shared);",
    ),
    Fault(
        *("unbalanced_ot_kernel", "float32, several blocks", "unbalanced_ot", "unbalanced_ot.cu"),
        "if (thread >= at.count) return;",
        "if (thread >= at.count - (FAULT && t.cost.dtype == DType::f32 && group > 0)) return;",
    ),
    Fault(
        *("unbalanced_ot_kernel", "float64, several blocks", "unbalanced_ot", "unbalanced_ot.cu"),
        "t.v[problem * columns + j] = bad ? NAN :",
        "t.v[problem * columns + j] = bad || (FAULT && !ALONE && t.cost.dtype == DType::f64) ? NAN :",
    ),
    Fault(
        *("unbalanced_ot_kernel", "steepest, one block", "unbalanced_ot", "unbalanced_ot.cu"),
        "for_rows([&](int i) { along[1] += t.tau_a * square(by_row(OF_TRIAL)[i]); });",
        "for_rows([&](int i) { along[1] += FAULT * ALONE * 1e9 + t.tau_a * square(by_row(OF_TRIAL)[i]); });",
    ),
    Fault(
        *("unbalanced_ot_kernel", "steepest, several blocks", "unbalanced_ot", "unbalanced_ot.cu"),
        "for_shared_columns([&](int j) { along[1] += t.tau_b",
        "for_shared_columns([&](int j) { along[1] += FAULT * !ALONE * 1e9 + t.tau_b",
    ),
]
# What no process survives, or what a launch reports.
LAUNCH = Fault(
    *("a launch error", "all", "client_weights", "client_weights.cu"),
    "launch(shape, stream, client_weights_kernel,",
    "launch({shape.grid, dim3(shape.block.x + FAULT), shape.shared}, stream, client_weights_kernel,",
)
HANG = Fault(
    *("a hang", "all", "client_weights", "client_weights.cu"),
    "double* const factor = vectors + OF_VECTORS;",
    "while (*static_cast<volatile int*>(&fedkernels_fault) == FAULT_NUMBER) {}\n"
    "  double* const factor = vectors + OF_VECTORS;",
)
CRASH = Fault(
    *("an illegal address", "all", "client_weights", "client_weights.cu"),
    "double* const vectors = dynamic_shared<double>();",
    "if (FAULT) *reinterpret_cast<volatile int*>(16) = 1;\n  double* const vectors = dynamic_shared<double>();",
)
ALL = [*FAULTS, LAUNCH, HANG, CRASH]


def number_of(fault: Fault) -> int:
    return ALL.index(fault) + 1


class FaultyCompiler(Compiler):
    """Compiles the files of csrc/cuda with all faults, which are off."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.texts = {path.name: path.read_text(encoding="utf-8") for path in CUDA.glob("*.cu")}
        for fault in ALL:
            text = self.texts[fault.file]
            assert text.count(fault.old) == 1, f"{fault.name}: {text.count(fault.old)} times"
            number = str(number_of(fault))
            new = fault.new.replace("FAULT_NUMBER", number).replace("FAULT", f"(fedkernels_fault == {number})")
            self.texts[fault.file] = text.replace(fault.old, new)

    def load(self, source: str):
        if source not in self.libraries:
            self.libraries[source] = self.compile(PRELUDE + self.texts[source], Path(source).stem)
        library = self.libraries[source]
        assert not isinstance(library, Exception)
        return library
