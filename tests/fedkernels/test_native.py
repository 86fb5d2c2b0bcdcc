"""The compiled module: its operators, instruction sets and threads, what happens without it, and its build."""

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
from torch.utils._python_dispatch import TorchDispatchMode

import fedkernels
from fedkernels import _native, info_nce, nt_xent

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


def problems():
    """Arguments of every compiled operator."""
    params, clients = [randn(40, 50), randn(7)], [randn(40, 50, seed=1), randn(7, seed=1)]
    deltas = randn(9, 30)
    cost, masses = randn(3, 20, 17).abs(), torch.ones(3, 20).double()
    return {
        "apply_deltas": ([t.clone() for t in params], clients, torch.tensor([0.5]).double()),
        "client_weights": (deltas @ deltas.T, 1e-8),
        "delta_gram": (params, clients + [t + 1 for t in clients]),
        "info_nce": (randn(37, 20), randn(50, 20, seed=1), 0.3, "mean", True, True, False),
        "linear_cka": (randn(2, 37, 20), randn(37, 50, seed=1), True, True, True),
        "linear_cka_pairwise": ([randn(37, 20), randn(37, 9, seed=1)], [randn(37, 50, seed=2)], True),
        "linear_cka_to_kernel": (randn(2, 37, 20), randn(37, 37, seed=1), True, True),
        "nt_xent": (randn(37, 20), randn(37, 20, seed=1), 0.3, "sum", True, False),
        "unbalanced_ot": (cost, masses, masses[:, :17].contiguous(), 0.8, 0.9, 1e-4, 1000, "accelerated"),
    }


@pytest.mark.usefixtures("native")
def test_an_unknown_instruction_set_is_told():
    _, told = run("import fedkernels", FEDKERNELS_CPU="avx1024")
    assert "FEDKERNELS_CPU must be one of" in told
    assert "got 'avx1024'" in told
    assert "FEDKERNELS_CPU" not in run("import fedkernels", FEDKERNELS_CPU="baseline")[1]


def test_every_compiled_operator_is_tried_here():
    assert set(problems()) == set(_native.COMPILED)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", _native.COMPILED)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.fedkernels, name).default, problems()[name])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_opcheck_of_the_contrastive_losses(reduction, wanted):
    """Which gradients come with the losses depends on the reduction, and so do the shapes of what is returned."""
    operators, utilities = torch.ops.fedkernels, ("test_schema", "test_autograd_registration", "test_faketensor")
    query, key = randn(37, 20).requires_grad_(wanted[0]), randn(50, 20, seed=1).requires_grad_(wanted[1])
    torch.library.opcheck(
        operators.info_nce.default, (query, key, 0.3, reduction, *wanted, False), test_utils=utilities
    )
    views = query, key.detach()[:37].clone().requires_grad_(wanted[1])
    torch.library.opcheck(operators.nt_xent.default, (*views, 0.3, reduction, any(wanted), False), test_utils=utilities)


class Precisions(TorchDispatchMode):
    """Whether the contrastive operators were told that tf32 is allowed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fedkernels":
            self.seen.append((function._schema.name.partition("::")[2], args[-1]))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def matmul():
    """torch's settings for matrices on CUDA, which are the same afterwards."""
    settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    yield settings
    settings.allow_tf32 = False
    settings.fp32_precision = before


def both_losses(rows):
    return info_nce(rows, rows, 0.3, "none").sum() + nt_xent(rows, rows, 0.3, "none").sum()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("name", "on", "off"), [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")])
def test_contrastive_operators_are_told_whether_tf32_is_allowed(matmul, name, on, off):
    for setting in (on, off):
        setattr(matmul, name, setting)
        with Precisions() as told:
            loss = both_losses(randn(5, 4).requires_grad_())
            setattr(matmul, name, off)  # the backward pass multiplies as the forward pass did
            loss.backward()
        names = "info_nce", "nt_xent", "nt_xent_gradients", "info_nce_gradients"
        assert told.seen == [(operator, setting == on) for operator in names]


@pytest.mark.usefixtures("native")
def test_a_compiled_loss_follows_the_setting_for_tf32(matmul):
    told = []

    def backend(graph, _inputs):
        calls = (node for node in graph.graph.nodes if "fedkernels" in str(node.target))
        told.append([call.args[-1] for call in calls if call.args and isinstance(call.args[-1], bool)])
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(both_losses, fullgraph=True, backend=backend)
    for setting in ("ieee", "tf32", "ieee", "tf32"):
        matmul.fp32_precision = setting
        compiled(randn(5, 4))
    assert told == [[False, False], [True, True]]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("samples", [7, 40])  # in sample space, in feature space
def test_opcheck_of_linear_cka(samples, wanted):
    operators, utilities = torch.ops.fedkernels, ("test_schema", "test_autograd_registration", "test_faketensor")
    x, y = randn(3, 1, samples, 5).requires_grad_(wanted[0]), randn(2, samples, 9, seed=1).requires_grad_(wanted[1])
    torch.library.opcheck(operators.linear_cka.default, (x, y, False, *wanted), test_utils=utilities)
    kernel = (y @ y.mT).detach()
    torch.library.opcheck(operators.linear_cka_to_kernel.default, (x, kernel, True, wanted[0]), test_utils=utilities)


def similarities():
    """Calls of the operators of CKA that take each way through their products, large enough to be shared by threads."""
    few, many = [randn(300, width, seed=width) for width in (170, 200, 90)], randn(2100, 90)
    kernel = many @ many.T
    operators = torch.ops.fedkernels
    return {
        "samples": lambda: operators.linear_cka(few[0], few[1], True, True, True),
        "features": lambda: operators.linear_cka(many, many[:, :70].exp(), True, True, True),
        "kernel, samples": lambda: operators.linear_cka_to_kernel(few[0], kernel[:300, :300].contiguous(), True, True),
        "kernel, features": lambda: operators.linear_cka_to_kernel(many, kernel, True, True),
        "pairs, samples": lambda: operators.linear_cka_pairwise(few, [], True),
        "pairs, features": lambda: operators.linear_cka_pairwise([many, many[:, :3].exp()], [many[:, :40].exp()], True),
    }


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", similarities())
def test_threads_agree_on_similarities_to_the_last_bit(name):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            result = similarities()[name]()
            results.append([result] if isinstance(result, torch.Tensor) else result)
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))


def gradients_by_weights():
    """Arguments of the operators that form the gradients once the weights of the losses are known."""
    rows, weights = randn(900, 20), torch.linspace(-0.5, 1.5, 1400).double()
    return {
        "info_nce_gradients": (randn(700, 20, seed=1), rows, 0.3, weights[:700].clone(), True, True, False),
        "nt_xent_gradients": (randn(700, 20, seed=1), rows[:700].clone(), 0.3, weights, False),
    }


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", gradients_by_weights())
def test_gradients_by_weights(name):
    operator, arguments = getattr(torch.ops.fedkernels, name).default, gradients_by_weights()[name]
    torch.library.opcheck(operator, arguments)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            result = operator(*arguments)
            results.append([result] if isinstance(result, torch.Tensor) else result)
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", _native.COMPILED)
def test_threads_agree_to_the_last_bit(name):
    before, results = torch.get_num_threads(), []
    large = [randn(700, 90), randn(11)]
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            if name == "apply_deltas":
                arguments = ([t.clone() for t in large], [t + 1 for t in large], torch.tensor([0.3]).double())
            elif name == "delta_gram":
                arguments = (large, [*(t + 1 for t in large), *(t - 2 * t.abs() for t in large)])
            elif name == "unbalanced_ot":  # one problem, large enough to be shared by threads
                masses = torch.ones(370).double()
                arguments = (randn(370, 370).abs(), masses, masses, 0.8, 0.9, 1e-3, 1000, "accelerated")
            elif name == "info_nce":  # several groups of queries and blocks of keys
                arguments = (randn(700, 20), randn(900, 20, seed=1), 0.3, "mean", True, True, False)
            elif name == "nt_xent":
                arguments = (randn(700, 20), randn(700, 20, seed=1), 0.3, "mean", True, False)
            else:
                arguments = problems()[name]
            result = getattr(torch.ops.fedkernels, name)(*arguments)
            result = arguments[0] if result is None else result
            results.append([result] if isinstance(result, torch.Tensor) else list(result))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))


AGAINST_REFERENCE = """
import torch, fedkernels
from fedkernels import _native
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
def results():
    start = [t.clone() for t in params[3]]
    fedkernels.apply_deltas(start, params[1:], [0.2, 0.3, 0.4])
    value = fedkernels.unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9)
    steep = fedkernels.unbalanced_ot(cost, 1.0, 1.0, 0.8, 0.9, method="steepest", tol=1e-2)
    weights = fedkernels.client_weights(gram @ gram.T)
    return [*start, fedkernels.delta_gram(params[0], params[1:]), value, steep, weights, *similarities()]
native = results()
print(fedkernels.build_info()["cpu_used"])
_native.module = None
for one, other in zip(native, results(), strict=True):
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


class Transport(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return fedkernels.unbalanced_ot(randn(4, 20, 20, seed=index).abs(), 1.0, 1.0, 0.8, 0.8)


def test_forked_workers():
    """A child must not wait for threads that only its parent has."""
    here = [Transport()[index] for index in range(4)]
    there = torch.utils.data.DataLoader(Transport(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(x, y) for x, y in zip(here, there, strict=True))


@pytest.mark.usefixtures("native")
def test_in_place_writes_are_seen_by_autograd():
    weight = torch.nn.Parameter(randn(3))
    loss = weight.square().sum()
    fedkernels.apply_deltas([weight], [[randn(3, seed=1)]], [1.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


SCHEMAS = _native.SCHEMAS


@pytest.mark.skipif(_native.module is None, reason="not compiled")
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
    monkeypatch.setattr(_native, "SCHEMAS", expected)
    with pytest.warns(UserWarning, match=f"compiled from other sources, with other schemas of {differing}\\."):
        module, reason = _native._load()
    assert module is None
    assert differing in reason


@pytest.mark.skipif(_native.module is None, reason="not compiled")
def test_a_module_of_sources_that_do_not_tell_their_schemas_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "fedkernels._C", ModuleType("fedkernels._C"))
    with pytest.warns(UserWarning, match="with other schemas of apply_deltas, .*unbalanced_ot"):
        assert _native._load()[0] is None


@pytest.mark.skipif(_native.module is None, reason="not compiled")
def test_the_operators_are_registered_with_the_schemas_of_the_file():
    registered = {name: str(getattr(torch.ops.fedkernels, name).default._schema) for name in SCHEMAS}
    assert registered == {name: f"fedkernels::{name}{schema}" for name, schema in SCHEMAS.items()}
    assert {*_native.COMPILED, *_native.PARTS, "info_nce_gradients", "nt_xent_gradients"} == set(SCHEMAS)


class OfGPUs:
    """A module that was compiled for GPUs of which cuda:1 is none."""

    def cuda_unusable(self, gpu):
        return "no kernel image is available" if gpu == 1 else ""

    def build_info(self):
        return {"cuda": "sm_90 compute_90"}


@pytest.mark.skipif(_native.module is None, reason="not compiled")
def test_a_gpu_that_cannot_run_the_kernels_gets_the_references(monkeypatch):
    """Told once; another GPU beside it is served."""
    monkeypatch.setattr(_native, "module", OfGPUs())
    monkeypatch.setattr(_native, "CUDA", frozenset({"info_nce"}))
    monkeypatch.setattr(_native, "_unusable", {})
    with FakeTensorMode():
        good, bad = (torch.empty(2, 3, device=f"cuda:{gpu}") for gpu in (0, 1))
        assert _native.operator("info_nce", good, good) is torch.ops.fedkernels.info_nce.default
        told = "references on cuda:1, .* compiled for sm_90 .*: no kernel image"
        with pytest.warns(UserWarning, match=told):
            assert _native.operator("info_nce", bad, bad) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _native.operator("info_nce", bad, bad) is None
        assert _native.operator("info_nce", good, bad) is None
        assert _native.operator("client_weights", good) is None


@pytest.mark.skipif(_native.module is None, reason="not compiled")
def test_a_module_without_cuda_says_so():
    if "none" not in fedkernels.build_info()["cuda_compiled"]:
        pytest.skip("compiled with CUDA")
    assert _native.module.cuda_unusable(0) == "no CUDA kernels are compiled"
    with pytest.raises(TypeError):
        _native.module.cuda_unusable("cuda:0")


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


@pytest.mark.usefixtures("native")
def test_subnormal_halves_count_where_the_processor_flushes():
    """A half below 6.1e-5 is no subnormal float32, and is read right where those are taken for 0."""
    halves = torch.arange(1, 0x7C00, 31, dtype=torch.int16).view(torch.float16)
    truth = halves.double().square()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        found = [fedkernels.delta_gram([torch.zeros_like(half)], [[half]]) for half in halves]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(torch.cat(found).flatten(), truth)
