"""The compiled module: how it is loaded and built, its instruction sets, and what happens without it."""

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fedkernels
from fedkernels.internal import first_contact, native

PACKAGE = Path(fedkernels.__file__).parent
COMPILED = pytest.mark.usefixtures("native")


# An editable installation answers for fedkernels._C, wherever fedkernels itself comes from.
WITHOUT_EDITABLE = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]\n"
)


def run(code, *, python=sys.executable, path=PACKAGE.parent, **environment):
    """`code` in a fresh process that imports fedkernels from `path`."""
    env = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([python, "-c", WITHOUT_EDITABLE + code], capture_output=True, text=True, env=env, cwd=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip(), done.stderr.strip()


@COMPILED
@pytest.mark.parametrize(
    ("wanted", "told"), [("avx1024", "FEDKERNELS_CPU must be one of .*, got 'avx1024'"), ("baseline", "")]
)
def test_an_unknown_instruction_set_is_told(monkeypatch, wanted, told):
    """Those that are known are used: test_properties.py."""
    monkeypatch.setenv("FEDKERNELS_CPU", wanted)
    with pytest.warns(UserWarning, match=told) if told else nullcontext():
        assert native._load()[0] is native.module


@pytest.mark.usefixtures("native")
def test_a_second_torch_loads_the_same_module():
    python = os.environ.get("FEDKERNELS_SECOND_PYTHON")
    if not python:
        pytest.skip("FEDKERNELS_SECOND_PYTHON names no Python with another version of torch")
    version, _ = run("import torch; print(torch.__version__)", python=python)
    assert version != torch.__version__
    run("from tests.fedkernels.test_properties import compare_all_blocks; compare_all_blocks(False)", python=python)
    assert run("import fedkernels; print(fedkernels.build_info()['native'])", python=python)[0] == "used"


REPORT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fedkernels
    fedkernels.unbalanced_ot(__import__("torch").rand(3, 3), 1.0, 1.0, 0.8, 0.8)
print(len(caught), *(str(w.message) for w in caught))
print(fedkernels.build_info())
"""


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("_C.missing", "CompileError: no c++\n", "it was not compiled (CompileError: no c++)"),
        ("_C.abi3.so", "x", "it does not load: "),
        ("__init__.py", "", "it was not compiled when fedkernels was installed"),
    ],
)
def test_a_missing_or_broken_module_is_told(tmp_path, monkeypatch, file, text, told):
    """Once. That the references serve then, the last test here sees."""
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(fedkernels, "__path__", [str(tmp_path)])
    monkeypatch.setattr(native, "_NOTE", tmp_path / "_C.missing")
    monkeypatch.delitem(sys.modules, "fedkernels._C", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    exec(WITHOUT_EDITABLE)
    with pytest.warns(UserWarning, match="fedkernels runs on its slower references") as warned:
        module, reason = native._load()
    assert module is None
    assert reason.startswith(told)
    assert reason in str(warned[0].message)


SCHEMAS = native.SCHEMAS


@COMPILED
@pytest.mark.parametrize(
    ("expected", "differing"),
    [
        (SCHEMAS | {"newer_operator": "(Tensor x) -> Tensor"}, "newer_operator"),
        ({name: schema for name, schema in SCHEMAS.items() if name != "delta_gram"}, "delta_gram"),
        (SCHEMAS | {"info_nce_gradients": SCHEMAS["info_nce"]}, "info_nce_gradients"),
        (SCHEMAS | {"nt_xent": SCHEMAS["nt_xent"].replace("view1", "view")}, "nt_xent"),
    ],
)
def test_a_module_with_other_schemas_is_not_used(monkeypatch, expected, differing):
    monkeypatch.setattr(native, "SCHEMAS", expected)
    with pytest.warns(UserWarning, match=f"compiled from other sources, with other schemas of {differing}\\."):
        module, reason = native._load()
    assert module is None
    assert differing in reason


@COMPILED
def test_a_module_of_sources_that_do_not_tell_their_schemas_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "fedkernels._C", ModuleType("fedkernels._C"))
    with pytest.warns(UserWarning, match="with other schemas of add_products, .*unbalanced_ot"):
        assert native._load()[0] is None


@COMPILED
def test_the_operators_are_registered_with_the_schemas_of_the_file():
    registered = {name: str(getattr(torch.ops.fedkernels, name).default._schema) for name in SCHEMAS}
    assert registered == {name: f"fedkernels::{name}{schema}" for name, schema in SCHEMAS.items()}


class OfGPUs:
    """A module that was compiled for GPUs of which cuda:1 is none."""

    def cuda_unusable(self, gpu):
        return "no kernel image is available" if gpu == 1 else ""

    def build_info(self):
        return {"cuda": "sm_90 compute_90"}


@COMPILED
def test_a_gpu_that_cannot_run_the_kernels_gets_the_references(monkeypatch):
    """Told once; another GPU beside it is served."""
    monkeypatch.setattr(native, "module", OfGPUs())
    monkeypatch.setattr(native, "CUDA", frozenset({"info_nce"}))
    monkeypatch.setattr(native, "_unusable", {})
    monkeypatch.setattr(first_contact, "verdicts", {("info_nce", 0): True})
    with FakeTensorMode():
        good, bad = (torch.empty(2, 3, device=f"cuda:{gpu}") for gpu in (0, 1))
        assert native.operator("info_nce", good, good) is torch.ops.fedkernels.info_nce.default
        told = "references on cuda:1, .* compiled for sm_90 .*: no kernel image"
        with pytest.warns(UserWarning, match=told):
            assert native.operator("info_nce", bad, bad) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert native.operator("info_nce", bad, bad) is None
        assert native.operator("info_nce", good, bad) is None
        assert native.operator("client_weights", good) is None


@COMPILED
def test_a_module_without_cuda_says_so():
    if "none" not in fedkernels.build_info()["cuda_compiled"]:
        pytest.skip("compiled with CUDA")
    assert native.module.cuda_unusable(0) == "no CUDA kernels are compiled"
    with pytest.raises(TypeError):
        native.module.cuda_unusable("cuda:0")


def test_the_environment_forces_the_references():
    """Without a warning, in a process that never loads the module."""
    out, _ = run(REPORT, FEDKERNELS_NATIVE="0")
    assert out.startswith("0\n{'native': 'not used: FEDKERNELS_NATIVE=0 is set in the environment', 'operators': ''}")
