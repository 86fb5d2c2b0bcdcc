"""Faults in the CUDA kernels, all compiled into one library and turned on one at a time."""

import re
from typing import NamedTuple

from tests.cuda_on_cpu.emulation import CUDA, text_of

# As a patch: the file, the kernel, the dtypes or the case that it concerns, in brackets the operator whose self-test
# must find it; then a text that the file holds once, and what replaces it, where FAULT is true while that fault is on.
_PATCH = """
client_weights.cu: client_weights_kernel, all (client_weights)
-if (i > j && i < count) value -= triangle(i, j) * solution[j];
+if (i > j + FAULT && i < count) value -= triangle(i, j) * solution[j];
client_weights.cu: client_weights_kernel, all, equal clients (client_weights)
-if (real) entry(i, i) = 1 + ridge;
+if (real) entry(i, i) = 1 + (FAULT ? 0 : ridge);
client_weights.cu: client_weights_kernel, all, a batch (client_weights)
-const double weight = solver.solve(gram, problem * entries, tol);
+const double weight = solver.solve(gram, FAULT ? 0 : problem * entries, tol);
contrastive_tensor_cores.cu: contrastive_kernel, bfloat16 (info_nce)
-return pack_bfloat(first, second);
+return pack_bfloat(first, FAULT ? first : second);
contrastive_tensor_cores.cu: contrastive_kernel, float16 (info_nce)
-return pack_half(first, second);
+return pack_half(first, FAULT ? first : second);
contrastive_tensor_cores.cu: contrastive_kernel, all, the last tile (info_nce)
-if (column >= pass.column_count) logits
+if (column >= pass.column_count + FAULT) logits
contrastive_tensor_cores.cu: contrastive_kernel, all, scaling of sums (info_nce)
-total[m][h] *= factor;
+total[m][h] *= FAULT ? 1 : factor;
contrastive_tensor_cores.cu: join_kernel, all (info_nce)
-sum / total - T::Precision
+sum / (total + FAULT) - T::Precision
contrastive_tiles.cu: row_sums_kernel, float32 (nt_xent)
-left_out(tile, row, tile.first_column + at, positive) : at == self);
+left_out(tile, row, tile.first_column + at, positive) : at == self + (FAULT && sizeof(Number) == 4));
contrastive_tiles.cu: row_sums_kernel, float64 (info_nce)
-} else if (at >= 0) {
+} else if (at >= (FAULT && sizeof(Number) == 8)) {
contrastive_tiles.cu: row_sums_kernel, all, classes (similarity_logsumexp)
-if (c == row || tile.classes[c] != tile.classes[row]) continue;
+if (c == row - FAULT || tile.classes[c] != tile.classes[row]) continue;
contrastive_tiles.cu: column_sums_kernel, float32 (similarity_logsumexp)
-bool out = at >= rows ||
+bool out = at >= rows - (FAULT && sizeof(Number) == 4) ||
contrastive_tiles.cu: weights_kernel, bfloat16 (nt_xent)
-to->bits = float_to_bfloat(value);
+to->bits = float_to_bfloat(value) & (FAULT ? 0xffc0 : 0xffff);
contrastive_tiles.cu: weights_kernel, float16 (info_nce)
-to->bits = float_to_half(value);
+to->bits = float_to_half(value) & (FAULT ? 0xff00 : 0xffff);
contrastive_tiles.cu: weights_kernel, float32 (similarity_logsumexp)
-given.constants[1], column, exact_scale);
+given.constants[1], column + (FAULT && sizeof(Number) == 4 && column > 0 ? -1 : 0), exact_scale);
contrastive_tiles.cu: weights_kernel, float64 (info_nce)
-weight = static_cast<Number>(weights ? weights[index] : constant);
+weight = static_cast<Number>((weights ? weights[index] : constant) * (1 + (FAULT && sizeof(Number) == 8) * 1e-6));
contrastive_tiles.cu: sigmoid_kernel, float32 (sigmoid_loss)
-sign = c == positive ? 1 : -1,
+sign = c == positive + (FAULT && sizeof(Number) == 4) ? 1 : -1,
contrastive_tiles.cu: reduce_kernel, all (similarity_logsumexp)
-given.of_columns * given.columns[i]
+given.of_columns * given.columns[FAULT ? 0 : i]
contrastive_tiles.cu: reduce_kernel, all, a temperature (nt_xent)
-(tile.divides ? -tile.scale
+(tile.divides ? (FAULT ? 1 : -1) * tile.scale
contrastive_tiles.cu: finish_kernel, bfloat16, a lost positive (info_nce)
-if (made_good) sums[k] +=
+if (made_good && !(FAULT && side)) sums[k] +=
contrastive_tiles.cu: finish_kernel, all, classes (similarity_logsumexp)
-sums[k] -= 2 * given.factor
+sums[k] -= (FAULT ? 1 : 2) * given.factor
contrastive_tiles.cu: finish_kernel, all, the bias (sigmoid_loss)
-write_one(given.to_bias, 0, grad * given.numbers[1]);
+write_one(given.to_bias, 0, grad * given.numbers[FAULT ? 0 : 1]);
linear_cka_prepare.cu: maxima_kernel, float32 (linear_cka)
-if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
+if (threadIdx.x == 0) maxima[blockIdx.x] = FAULT ? T(1) : largest;
linear_cka_prepare.cu: means_kernel, float32 (linear_cka)
-mine[e] += static_cast<double>(values[e] * scale - first[e] * scale);
+mine[e] += static_cast<double>(values[e] * scale - first[FAULT && sizeof(T) == 4 ? 0 : e] * scale);
linear_cka_prepare.cu: means_kernel, float64 (linear_cka_pairwise)
-if (threadIdx.x < WIDTH) sums[
+if (threadIdx.x < (FAULT && sizeof(T) == 8 ? 1 : WIDTH)) sums[
linear_cka_prepare.cu: write_kernel, float32 (linear_cka_to_kernel)
-four.values[e] = (values[e] * scale - first[e]) - mean[e];
+four.values[e] = (values[e] * scale - first[e]) - mean[FAULT && sizeof(T) == 4 ? 0 : e];
linear_cka_prepare.cu: write_kernel, float64 (linear_cka)
-if (e < count) to[e] = four.values[e];
+if (e < count) to[e] = four.values[FAULT && sizeof(T) == 8 ? 0 : e];
linear_cka_combine.cu: inner_products_kernel, float32 (linear_cka)
-for (int64_t at = block * THREADS + threadIdx.x; at < term.count;
+for (int64_t at = block * THREADS + threadIdx.x; at < term.count - (FAULT && sizeof(T) == 4);
linear_cka_combine.cu: inner_products_kernel, float64 (linear_cka)
-const T *const left = term.left + problem * term.left_step,
+const T *const left = term.left + (FAULT && sizeof(T) == 8 ? 0 : problem) * term.left_step,
linear_cka_combine.cu: combine_kernel, float32 (linear_cka)
-((i < x_width * x_width ? of_xx : of_cross) * x_scale));
+((i < x_width * (x_width - (FAULT && sizeof(T) == 4)) ? of_xx : of_cross) * x_scale));
linear_cka_combine.cu: combine_kernel, float64 (linear_cka)
-if (of_y) of_y[i] = static_cast<T>((of_cross * x + of_yy * y) * y_scale);
+if (of_y) of_y[i] = static_cast<T>(((FAULT && sizeof(T) == 8 ? 0 : of_cross) * x + of_yy * y) * y_scale);
two_views.cu: two_views_kernel, float32 (two_views)
-store(float* to, float value) { *to = value; }
+store(float* to, float value) { *to = FAULT ? -value : value; }
two_views.cu: two_views_kernel, bfloat16 (two_views)
-batch.channels_last ? pixel * batch.channels + c :
+batch.channels_last ? pixel * batch.channels + (FAULT ? C - 1 - c : c) :
two_views.cu: two_views_kernel, one channel (two_views)
-step.offset = static_cast<float>(total / area) * (1 - step.factor);
+step.offset = FAULT && C == 1 ? 0 : static_cast<float>(total / area) * (1 - step.factor);
two_views.cu: two_views_kernel, in device memory (two_views)
-float* const plane = memory ? memory + static_cast<int64_t>(blockIdx.x) * C * area
+float* const plane = memory ? memory + static_cast<int64_t>(blockIdx.x) * C * area + FAULT
two_views.cu: two_views_kernel, all, the blur (two_views)
-return index < size ? index : 2 * size - 2 - index;
+return index < size ? index : 2 * size - 2 + FAULT - index;
unbalanced_ot.cu: unbalanced_ot_kernel, float32, [3, 30, 20], one block (unbalanced_ot)
-lane / 4 < at.count) to[
+lane / 4 < at.count - (FAULT && t.cost.dtype == DType::f32)) to[
unbalanced_ot.cu: unbalanced_ot_kernel, float64, [1, 12, 100], one block (unbalanced_ot)
-{ write_one(t.plan, index, e.plan); }
+{ write_one(t.plan, index, FAULT && ALONE && t.cost.dtype == DType::f64 ? 0 : e.plan); }
unbalanced_ot.cu: unbalanced_ot_kernel, float32, [1, 128, 128], beyond shared memory (unbalanced_ot)
-memory + (place - layout.in_shared);
+memory + (FAULT && ALONE ? 0 : place - layout.in_shared);
unbalanced_ot.cu: unbalanced_ot_kernel, float32, [1, 9, 130], several blocks (unbalanced_ot)
-if (thread >= at.count) return;
+if (thread >= at.count - (FAULT && t.cost.dtype == DType::f32 && group > 0)) return;
unbalanced_ot.cu: unbalanced_ot_kernel, float64, [2, 11, 130], several blocks (unbalanced_ot)
-t.v[problem * columns + j] = bad ? NAN :
+t.v[problem * columns + j] = bad || (FAULT && !ALONE && t.cost.dtype == DType::f64) ? NAN :
unbalanced_ot.cu: unbalanced_ot_kernel, float32, [2, 12, 9], steepest, one block (unbalanced_ot)
-for_rows([&](int i) { along[1] += t.tau_a * square(by_row(OF_TRIAL)[i]); });
+for_rows([&](int i) { along[1] += FAULT * ALONE * 1e9 + t.tau_a * square(by_row(OF_TRIAL)[i]); });
unbalanced_ot.cu: unbalanced_ot_kernel, float32, [1, 9, 130], steepest, several blocks (unbalanced_ot)
-for_shared_columns([&](int j) { along[1] += t.tau_b
+for_shared_columns([&](int j) { along[1] += FAULT * !ALONE * 1e9 + t.tau_b
client_weights.cu: a launch error, all (client_weights)
-launch(shape, stream, client_weights_kernel,
+launch({shape.grid, dim3(shape.block.x + FAULT), shape.shared}, stream, client_weights_kernel,
"""
# As above: barriers that are missing, and memory that is shared by mistake. What finds them is one of the two orders.
_PATCH_OF_ORDERS = """
client_weights.cu: client_weights_kernel, the corrections (client_weights)
-    if (i < count) values[chosen[i]] = part;
-    __syncthreads();
+    if (i < count) values[chosen[i]] = part;
+    if (!FAULT) __syncthreads();
two_views.cu: two_views_kernel, the view before (two_views)
-__syncthreads();  // the view before is written
+if (!FAULT) __syncthreads();
two_views.cu: two_views_kernel, before the blur (two_views)
-    if (!radius) continue;
-    __syncthreads();
+    if (!radius) continue;
+    if (!FAULT) __syncthreads();
two_views.cu: two_views_kernel, a row (two_views)
-      __syncwarp();
-      for (int x = lane
+      if (!FAULT) __syncwarp();
+      for (int x = lane
linear_cka_prepare.cu: means_kernel, the sums of the warps (linear_cka)
-(threadIdx.x % 32) + e] = mine[e];
-  __syncthreads();
+(threadIdx.x % 32) + e] = mine[e];
+  if (!FAULT) __syncthreads();
linear_cka_prepare.cu: write_kernel, the means (linear_cka)
-  __syncthreads();
-
-  const int column = part.lane_column()
+  if (!FAULT) __syncthreads();
+  const int column = part.lane_column()
contrastive_tiles.cu: column_sums_kernel, the largest (similarity_logsumexp)
-of_groups[group][lane] = largest;
-  __syncthreads();
+of_groups[group][lane] = largest;
+  if (!FAULT) __syncthreads();
contrastive_tensor_cores.cu: contrastive_kernel, the weights (info_nce)
-__syncthreads();  // all warps across have written their weights
+if (!FAULT) __syncthreads();
unbalanced_ot.cu: unbalanced_ot_kernel, u and v (unbalanced_ot)
-    __syncthreads();  // u and v have been read
-    for_rows([&](int i) {
+    if (!FAULT) __syncthreads();
+    for_rows([&](int i) {
unbalanced_ot.cu: unbalanced_ot_kernel, the turns of sums (unbalanced_ot)
-turn ^= 1;
+turn ^= FAULT ? 0 : 1;
unbalanced_ot.cu: unbalanced_ot_kernel, the last wait (unbalanced_ot)
-solver.wait();  // its memory is the next problem's
+if (!FAULT) solver.wait();
unbalanced_ot.cu: unbalanced_ot_kernel, scratch of its own (unbalanced_ot)
-memory + team * (layout.end() - layout.in_shared)
+memory + (FAULT ? 0 : team) * (layout.end() - layout.in_shared)
contrastive_tensor_cores.cu: contrastive_kernel, the wait for a copy (info_nce)
-    copy_async_wait<0>();
-    __syncthreads();  // the tile is there
+    if (!FAULT) copy_async_wait<0>();
+    __syncthreads();  // the tile is there
contrastive_tensor_cores.cu: contrastive_kernel, a barrier of some threads (info_nce)
-  copy_async_wait<0>();
-  __syncthreads();
-
+  copy_async_wait<0>();
+  if (!FAULT || threadIdx.x) __syncthreads();
+
contrastive_tensor_cores.cu: contrastive_kernel, a shuffle of some lanes (info_nce)
-top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
+if (!FAULT || lane) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
"""
# As above: memory that a kernel was not given. AddressSanitizer finds them.
_PATCH_OF_BOUNDS = """
contrastive_tensor_cores.cu: contrastive_kernel, global memory (info_nce)
-i + row < valid ? 16 : 0);
+i + row < valid + FAULT ? 16 : 0);
contrastive_tiles.cu: column_sums_kernel, shared memory (similarity_logsumexp)
-for (int i = 0; i < GROUPS<Number>; ++i) sum += totals[i][lane];
+for (int i = 0; i < GROUPS<Number> + FAULT; ++i) sum += totals[i][lane];
"""
_PRELUDE = 'extern "C" {\n__attribute__((weak)) int fedkernels_fault = 0;\n}\n'


class Fault(NamedTuple):
    file: str
    kernel: str
    family: str  # the dtypes or the case that it concerns
    operator: str  # whose self-test must find it
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.family}"


def _parsed(patch: str) -> list[Fault]:
    faults = []
    for place, *texts in re.findall(r"^(\w.*)\n((?:-.*\n)+)((?:\+.*\n)+)", patch, re.MULTILINE):
        head = re.fullmatch(r"(.+): (.+?), (.+) \((.+)\)", place)
        assert head is not None, place
        faults.append(Fault(*head.groups(), *(re.sub("^.", "", one[:-1], flags=re.MULTILINE) for one in texts)))
    assert len(faults) == len(re.findall(r"^\w", patch, re.MULTILINE)), "an entry has no text to replace"
    return faults


OF_ORDERS, OF_BOUNDS = _parsed(_PATCH_OF_ORDERS), _parsed(_PATCH_OF_BOUNDS)
*FAULTS, LAUNCH = _parsed(_PATCH)  # the last one: what a launch reports
ALL = [*FAULTS, LAUNCH, *OF_ORDERS, *OF_BOUNDS]


def number_of(fault: Fault) -> int:
    return ALL.index(fault) + 1


def faulty_kernels() -> dict[str, str]:
    """By name the texts of csrc/cuda/*.cu with all faults, which are off."""
    texts = {path.name: text_of(path) for path in CUDA.glob("*.cu")}
    for fault in ALL:
        assert texts[fault.file].count(fault.old) == 1, f"{fault.name}: {texts[fault.file].count(fault.old)} times"
        new = fault.new.replace("FAULT", f"(fedkernels_fault == {number_of(fault)})")
        texts[fault.file] = texts[fault.file].replace(fault.old, new)
    return {name.removesuffix(".cu"): _PRELUDE + text for name, text in texts.items()}
