"""The compiled module: how it is loaded and built, its instruction sets, and what happens without it."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fedkernels
from fedkernels.internal import first_contact, native

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(fedkernels.__file__).parent


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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


@pytest.mark.usefixtures("native")
def test_an_unknown_instruction_set_is_told():
    _, told = run("import fedkernels", FEDKERNELS_CPU="avx1024")
    assert "FEDKERNELS_CPU must be one of" in told
    assert "got 'avx1024'" in told
    assert "FEDKERNELS_CPU" not in run("import fedkernels", FEDKERNELS_CPU="baseline")[1]


AGAINST_REFERENCE = """
import torch, fedkernels
from fedkernels.internal import first_contact, native
generator = torch.Generator().manual_seed(0)
params = [[torch.randn(s, generator=generator).to(d) for s in [(30, 31), (5,)]] for d in
          (torch.float32, torch.float64, torch.bfloat16, torch.float16)]
cost, gram = torch.rand(2, 33, 21, generator=generator), torch.randn(70, 90, generator=generator).double()
def similarities():
    for dtype, rows in ((torch.float32, 300), (torch.float64, 300), (torch.float32, 61), (torch.float64, 61)):
        x, y = (torch.randn(2, rows, d, generator=torch.Generator().manual_seed(d)).to(dtype) for d in (75, 43))
        for centered in (False, True):
            leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
            value = fedkernels.linear_cka(*leaves, centered)
            to_kernel = fedkernels.linear_cka_to_kernel(leaves[0], y @ y.mT, centered)
            yield from (value.detach(), to_kernel.detach(), *torch.autograd.grad((value + 2 * to_kernel).sum(), leaves))
            yield fedkernels.linear_cka_to_kernel(x, y @ y.mT, centered)
            yield fedkernels.linear_cka_pairwise([*x, *y], [y[0], x[1]], centered)
    x, y = (torch.randn(1100, 600, generator=torch.Generator().manual_seed(d)).double() for d in (1, 2))  # full blocks
    for centered in (False, True):
        leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
        value = fedkernels.linear_cka(*leaves, centered)
        to_kernel = fedkernels.linear_cka_to_kernel(leaves[0], y @ y.mT, centered)
        yield from (value.detach(), to_kernel.detach(), *torch.autograd.grad(value + 2 * to_kernel, leaves))
        yield fedkernels.linear_cka_to_kernel(x[:, :7], y @ y.mT, centered)
        yield fedkernels.linear_cka_pairwise([x], [y, y + x], centered)
    for make in (fedkernels.CKAAccumulator, fedkernels.MinibatchCKA):
        for dtype in (torch.float32, torch.float64):
            accumulator = make()
            for start in range(0, 1100, 275):
                batch = slice(start, start + 275)
                ys = [y[batch, :37].to(dtype), (x + y)[batch].to(dtype)]
                accumulator.update([x[batch].to(dtype)], ys)
            yield accumulator.compute()
            if make is fedkernels.CKAAccumulator:
                yield accumulator.compute(debiased=True)
def losses():
    x, y = (torch.randn(2, 605, 43, generator=torch.Generator().manual_seed(d)).double() / 3 for d in (1, 2))
    for dtype in (torch.float32, torch.float64):
        image, text = (one[0].to(dtype).requires_grad_() for one in (x, y))
        numbers = torch.arange(605)
        loss = fedkernels.clip_loss(image, text, 2.0) + fedkernels.sigmoid_loss(image, text, 2.0, -1.0)
        loss = loss + fedkernels.supervised_contrastive_loss(image, numbers % 9, 0.5)
        left_out = {"labels": (numbers % 7, numbers % 5), "excluded": x[1] @ y[1].T > 1}
        loss = loss + fedkernels.info_nce(image, text, 0.5, **left_out)
        yield from (loss.detach(), *torch.autograd.grad(loss, (image, text)))
def views_of_images():
    options = fedkernels.ViewOptions(hue=0.5, solarize=0.3, blur_sigma=(0.1, 9.0))
    for shape in ((80, 3, 32, 32), (40, 3, 13, 47), (40, 1, 28, 28), (4, 3, 130, 75)):
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        yield fedkernels.two_views(images, torch.arange(len(images)), fedkernels.ViewKey(1), options)
def results():
    generator.manual_seed(1)
    start = [t.clone() for t in params[3]]
    fedkernels.apply_deltas(start, params[1:], [0.2, 0.3, 0.4])
    value = fedkernels.unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9)
    steep = fedkernels.unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9, method="steepest", tol=1e-2)
    weights = fedkernels.client_weights(gram @ gram.T)
    views = [view / 4 for pair in views_of_images() for view in pair]  # of values from 0 to 1
    others = [fedkernels.delta_gram(params[0], params[1:]), value, steep, weights]
    return [*start, *others, *views, *losses(), *similarities()]
compiled = results()
print(fedkernels.build_info()["cpu_used"])
native.module = None
for one, other in zip(compiled, results(), strict=True):
    torch.testing.assert_close(one, other)
"""


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_agrees_with_the_references(isa):
    if isa not in fedkernels.build_info()["cpu_compiled"].split():
        pytest.skip(f"{isa} is not compiled on this machine")
    used, _ = run(AGAINST_REFERENCE, FEDKERNELS_CPU=isa)
    if used != isa:
        pytest.skip(f"this processor has no {isa}; {used} agreed")


@pytest.mark.usefixtures("native")
def test_a_second_torch_loads_the_same_module():
    python = os.environ.get("FEDKERNELS_SECOND_PYTHON")
    if not python:
        pytest.skip("FEDKERNELS_SECOND_PYTHON names no Python with another version of torch")
    version, _ = run("import torch; print(torch.__version__)", python=python)
    assert version != torch.__version__
    run(AGAINST_REFERENCE, python=python)
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


def copy_of_package(folder):
    return shutil.copytree(PACKAGE, folder / "fedkernels", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))


def test_a_missing_module_is_told_once_and_the_references_serve(tmp_path):
    package = copy_of_package(tmp_path)
    out, _ = run(REPORT, path=tmp_path, FEDKERNELS_NATIVE="")
    assert out.startswith("1 fedkernels runs on its slower references")
    assert "not compiled when fedkernels was installed" in out
    (package / "_C.missing").write_text("CompileError: no c++\n")
    out, _ = run(REPORT, path=tmp_path, FEDKERNELS_NATIVE="")
    assert out.startswith("1 ")
    assert out.count("CompileError: no c++") == 2  # in the warning and in build_info


def test_a_module_that_does_not_load_is_told_with_its_reason(tmp_path):
    (copy_of_package(tmp_path) / "_C.abi3.so").write_bytes(b"not a library")
    out, _ = run(REPORT, path=tmp_path, FEDKERNELS_NATIVE="")
    assert out.startswith("1 ")
    assert out.count("it does not load") == 2


SCHEMAS = native.SCHEMAS


@pytest.mark.skipif(native.module is None, reason="not compiled")
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


@pytest.mark.skipif(native.module is None, reason="not compiled")
def test_a_module_of_sources_that_do_not_tell_their_schemas_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "fedkernels._C", ModuleType("fedkernels._C"))
    with pytest.warns(UserWarning, match="with other schemas of add_products, .*unbalanced_ot"):
        assert native._load()[0] is None


@pytest.mark.skipif(native.module is None, reason="not compiled")
def test_the_operators_are_registered_with_the_schemas_of_the_file():
    registered = {name: str(getattr(torch.ops.fedkernels, name).default._schema) for name in SCHEMAS}
    assert registered == {name: f"fedkernels::{name}{schema}" for name, schema in SCHEMAS.items()}
    gradients = {f"{name}_gradients" for name in ("info_nce", "nt_xent", "similarity_logsumexp")}
    assert {*native.COMPILED, *native.PARTS, *native.CONTRASTIVE_PARTS} | gradients == set(SCHEMAS)


class OfGPUs:
    """A module that was compiled for GPUs of which cuda:1 is none."""

    def cuda_unusable(self, gpu):
        return "no kernel image is available" if gpu == 1 else ""

    def build_info(self):
        return {"cuda": "sm_90 compute_90"}


@pytest.mark.skipif(native.module is None, reason="not compiled")
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


@pytest.mark.skipif(native.module is None, reason="not compiled")
def test_a_module_without_cuda_says_so():
    if "none" not in fedkernels.build_info()["cuda_compiled"]:
        pytest.skip("compiled with CUDA")
    assert native.module.cuda_unusable(0) == "no CUDA kernels are compiled"
    with pytest.raises(TypeError):
        native.module.cuda_unusable("cuda:0")


def test_the_environment_forces_the_references():
    out, _ = run(REPORT, FEDKERNELS_NATIVE="0")
    assert out.startswith("0\n")
    assert "FEDKERNELS_NATIVE=0" in out


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")
def test_without_a_compiler_the_build_succeeds_and_says_why(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc", "fedkernels", "fedssl"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    # CUDA would be compiled first, for minutes.
    env = os.environ | {"CC": "no-such-compiler", "CXX": "no-such-compiler", "FEDKERNELS_CUDA": "0"}
    command = [sys.executable, "setup.py", "build", "--build-base", "out", "--build-lib", "lib"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fedkernels._C is left out" in done.stdout + done.stderr
    assert "no-such-compiler" in (tmp_path / "lib/fedkernels/_C.missing").read_text()
    out, _ = run(REPORT, path=tmp_path / "lib", FEDKERNELS_NATIVE="")
    assert "no-such-compiler" in out
