// The Python module. Importing it registers the operators; its functions tell what it was compiled for, which
// instruction set is used, and whether a GPU can run the CUDA kernels.
#include <Python.h>

#include <string>

#include "cpu/isa.h"
#include "ops/schemas.h"

static PyObject* build_info(PyObject*, PyObject*) {
  static const char* const names[] = {"baseline", "avx2", "avx512"};
  return Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:s}", "compiled", FEDKERNELS_ISAS, "left_out",
                       FEDKERNELS_LEFT_OUT, "used",
                       names[static_cast<int>(fedkernels::isa())], "cuda", FEDKERNELS_CUDA, "compiler",
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

static PyObject* schemas(PyObject*, PyObject*) {
  std::string lines;
  for (const char* schema : fedkernels::SCHEMAS) lines.append(schema).append("\n");
  return PyUnicode_FromString(lines.c_str());
}

static PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, "What the module is compiled for: a dict of strings."},
    {"schemas", schemas, METH_NOARGS, "The schemas of the operators that the module registers, one a line."},
    {"cuda_unusable", cuda_unusable_on, METH_O, "Why the GPU of this number cannot run the kernels, or ''."},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
