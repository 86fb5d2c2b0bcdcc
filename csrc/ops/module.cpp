// The Python module: importing it registers the operators. It tells what it is compiled for, and nothing else.
#include <Python.h>

#include <cstdlib>
#include <cstring>

#include "cpu/isa.h"

namespace fedkernels {

[[maybe_unused]] static bool is_compiled(const char* name) { return std::strstr(FEDKERNELS_ISAS, name) != nullptr; }

static Isa best_isa() {
  Isa best = Isa::baseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    if (is_compiled("avx2")) best = Isa::avx2;
    if (is_compiled("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      best = Isa::avx512;
    }
  }
  const char* wanted = std::getenv("FEDKERNELS_CPU");
  if (wanted && std::strcmp(wanted, "baseline") == 0) best = Isa::baseline;
  if (wanted && std::strcmp(wanted, "avx2") == 0 && best == Isa::avx512 && is_compiled("avx2")) best = Isa::avx2;
#endif
  return best;
}

Isa isa() {
  static const Isa chosen = best_isa();
  return chosen;
}

}  // namespace fedkernels

// Of the operators' schemas and this module's functions, with fedkernels/_native.py: raised in both whenever one changes.
#define FEDKERNELS_INTERFACE "3"

static PyObject* build_info(PyObject*, PyObject*) {
  static const char* const names[] = {"baseline", "avx2", "avx512"};
  return Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:s,s:s}", "interface", FEDKERNELS_INTERFACE, "compiled", FEDKERNELS_ISAS,
                       "left_out", FEDKERNELS_LEFT_OUT, "used", names[static_cast<int>(fedkernels::isa())], "cuda",
                       FEDKERNELS_CUDA, "compiler",
#if defined(__clang__)
                       "clang " __clang_version__,
#else
                       "g++ " __VERSION__,
#endif
                       "torch", "2.11");
}

// Defined where CUDA kernels are compiled.
extern "C" __attribute__((weak)) const char* cuda_unusable(int device);

static PyObject* cuda_unusable_on(PyObject*, PyObject* number) {
  const long device = PyLong_AsLong(number);
  if (device == -1 && PyErr_Occurred()) return nullptr;
  const char* reason = cuda_unusable ? cuda_unusable(static_cast<int>(device)) : "no CUDA kernels are compiled";
  return PyUnicode_FromString(reason ? reason : "");
}

static PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, "What the module is compiled for: a dict of strings."},
    {"cuda_unusable", cuda_unusable_on, METH_O, "Why the GPU of this number cannot run the kernels, or ''."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
