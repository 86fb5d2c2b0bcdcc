"""When kernels are tested on a GPU, what is kept, what is told, and that nothing there touches this process.

With children that pretend. tests/cuda_on_cpu tests the cases, with emulated kernels.
"""

import inspect
import json
import runpy
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedkernels
from fedkernels.internal import first_contact, native, self_test_cases, self_test_outcomes, self_test_process
from fedkernels.internal.self_test_outcomes import FAILED, NOT_TESTED, PASSED, Card, Result

CARD = Card("Some card", "9.0", "driver 1")
OPERATORS = frozenset({"client_weights", "nt_xent", "two_views"})  # nt_xent is the one with a fault
CHILD = """
import json, os, signal, sys, time
def tell(*message): print("\\nfedkernels.self_test: " + json.dumps(message), flush=True)
print("what a library prints", end="")
{at_start}
tell(*{card})
for name in sys.argv[1:]:
    if name == "nt_xent":
        {of_nt_xent}
    else:
        tell(name, "passed", "", 0.1)
"""
PASS = 'tell(name, "passed", "", 0.1)'


class Machine:
    """With one kind of GPU, and a child process that does what it is told to."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.folder = monkeypatch, folder
        self.tested = []  # the operators of each child that was started
        self.child()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.delenv("FEDKERNELS_SELF_TEST", raising=False)
        monkeypatch.setattr(native, "CUDA", OPERATORS)
        monkeypatch.setattr(native, "runs_on", lambda gpu: True)
        monkeypatch.setattr(self_test_outcomes, "build", lambda: "digest")
        monkeypatch.setattr(self_test_outcomes, "card_of", lambda gpu: CARD)
        monkeypatch.setattr(self_test_process, "_child_command", self.command)
        self.new_process()

    def child(self, of_nt_xent=PASS, at_start="", card=CARD):
        self.script = CHILD.format(of_nt_xent=of_nt_xent, at_start=at_start, card=list(card))

    def command(self, gpu, operators):
        self.tested.append(" ".join(operators))
        return [sys.executable, "-c", self.script, *operators]

    def new_process(self):
        self.monkeypatch.setattr(first_contact, "verdicts", {})
        self.monkeypatch.setattr(first_contact, "_results", {})

    def files(self):
        return sorted(path for path in self.folder.rglob("*.json"))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


ALL = " ".join(sorted(OPERATORS))


def fails(error):
    def call(*_, **__):
        raise error

    return call


def serves(operator="client_weights", gpu=0):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return native._serves(operator, gpu)


def test_the_first_use_tests_all_and_the_outcomes_are_kept(machine, capfd):
    assert all(serves(operator) for operator in OPERATORS)
    assert machine.tested == [ALL]
    machine.new_process()
    assert serves()
    assert serves(gpu=1)  # a second card of the kind
    assert machine.tested == [ALL]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("fedkernels tests its CUDA kernels on Some card in a child process") == 1


# What goes wrong: what the child does for nt_xent, or at its start; what is told; whether it is kept.
FAULTS = {
    "a wrong value": ({"of_nt_xent": 'tell(name, "FAILED", "off by nan", 0.1)'}, "off by nan", True),
    "an error that breaks CUDA": ({"of_nt_xent": 'tell(name, "FAILED", "illegal", 0.1); break'}, "illegal", True),
    "a crash": ({"of_nt_xent": "os.kill(os.getpid(), signal.SIGSEGV)"}, "ended with SIGSEGV", True),
    "a hang": ({"of_nt_xent": "time.sleep(60)"}, "did not end within 2 s", True),
    "no memory on the card": ({"of_nt_xent": 'tell(name, "not tested", "out of memory", 0.1)'}, "out of memory", False),
    "no memory on the host": ({"of_nt_xent": "os.kill(os.getpid(), signal.SIGKILL)"}, "ended with SIGKILL", False),
    "an exit": ({"of_nt_xent": 'sys.exit("gone")'}, "ended with exit code 1: gone", False),
    "an exclusive card": ({"at_start": 'sys.exit("CUDA error: busy")'}, "exit code 1: CUDA error: busy", False),
    "no start": ({"at_start": "time.sleep(60)"}, "could be started: it did not end within 2 s", False),
    "another card": ({"card": ["Other", "8.0", ""]}, "the child process has another GPU", False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_met_by_the_child_and_the_reference_serves(machine, monkeypatch, name):
    child, reason, kept = FAULTS[name]
    machine.child(**child)
    monkeypatch.setattr(first_contact, "TIME_LIMIT", 2.0)
    if name == "no start":
        monkeypatch.setattr(self_test_process, "_START_LIMIT", 2.0)
    told = "did not pass the self-test" if kept else "could not be tested"
    with pytest.warns(UserWarning, match=f"{told}: .*{reason}.*python -m fedkernels.self_test") as warned:
        assert not native._serves("nt_xent", 0)
    assert len(warned) == 1
    assert "cuda:0 (Some card)" in str(warned[0].message)
    assert not serves("nt_xent")  # told once
    assert serves("client_weights") == serves("two_views") == ("of_nt_xent" in child)
    # In the next process the fault is gone: what was certain is still kept, and what was not is tested again.
    machine.child()
    machine.new_process()
    del machine.tested[:]
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        assert native._serves("nt_xent", 0) == (not kept)
    assert len(again) == kept
    assert machine.tested == ([] if kept else ["nt_xent" if "of_nt_xent" in child else ALL])


@pytest.mark.parametrize(
    ("patched", "value"),
    [
        ("sys.executable", None),
        ("sys.executable", "/usr/bin/an application"),  # in which Python is embedded
        ("sys.frozen", True),
        ("subprocess.Popen", fails(PermissionError("not permitted"))),
    ],
)
def test_where_no_child_can_be_started_the_references_serve(machine, monkeypatch, patched, value):
    monkeypatch.setattr(patched, value, raising=False)
    with pytest.warns(UserWarning, match=r"not be tested: .* Run `python -m fedkernels.self_test` once") as warned:
        assert not any(native._serves(operator, 0) for operator in OPERATORS)
    assert len(warned) == 1
    assert not machine.files()


def test_a_first_use_inside_a_backward_hook_calls_nothing_of_torch(machine, monkeypatch):
    """So neither autograd's thread nor another thread's capture of a CUDA graph can be in its way."""

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            raise AssertionError(f"{function} was called")

    def hook(gradient):
        with Refuse():
            found.append(serves("nt_xent"))

    for name in torch.cuda.__all__:
        if inspect.isfunction(getattr(torch.cuda, name)):
            monkeypatch.setattr(torch.cuda, name, fails(AssertionError(f"torch.cuda.{name} was called")))
    found = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    assert found == [True]


def test_threads_test_once(machine):
    threads = [threading.Thread(target=native._serves, args=("two_views", 0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.tested == [ALL]


@pytest.mark.parametrize(("time_limit", "tested"), [(20.0, []), (0.2, [ALL])])
def test_another_process_that_tests_is_waited_for(machine, monkeypatch, time_limit, tested):
    """Until the time limit. A lock of another open file is as another process's."""
    monkeypatch.setattr(first_contact, "TIME_LIMIT", 20.0)
    thread = threading.Thread(target=native._serves, args=("nt_xent", 0))
    with self_test_outcomes.one_at_a_time(CARD, 1.0):
        monkeypatch.setattr(first_contact, "TIME_LIMIT", time_limit)
        thread.start()
        thread.join(0.6 if not tested else None)
        assert thread.is_alive() == (not tested)
        self_test_outcomes.save(CARD, {name: Result(CARD.name, name, PASSED) for name in OPERATORS})
    thread.join()
    assert machine.tested == tested
    assert serves("nt_xent")


@pytest.mark.parametrize(("card", "build"), [(CARD._replace(driver="other"), "digest"), (CARD, "another")])
def test_another_card_driver_or_build_is_tested_again(machine, monkeypatch, card, build):
    assert serves()
    machine.new_process()
    monkeypatch.setattr(self_test_outcomes, "build", lambda: build)
    monkeypatch.setattr(self_test_outcomes, "card_of", lambda gpu: card)
    machine.child(card=card)
    assert serves()
    assert machine.tested == [ALL] * 2


@pytest.mark.parametrize(
    "contents",
    [b"", b"[1]", b"\xff", b"{}", b"[" * 100_000, b'{"reasons": {}}', b'{"driver": "3"}', b'{"reasons": 1}'],
)
def test_a_broken_file_counts_as_not_tested_and_is_replaced(machine, contents):
    assert serves()
    (file,) = machine.files()
    whole = file.read_bytes()
    # what is valid JSON replaces a part of it
    file.write_bytes(json.dumps(json.loads(whole) | json.loads(contents)).encode() if b'": ' in contents else contents)
    machine.new_process()
    assert serves()
    assert machine.tested == [ALL] * 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize("full", [False, True])
def test_where_nothing_can_be_kept_each_process_tests(machine, monkeypatch, tmp_path, full):
    if full:
        monkeypatch.setattr("os.replace", fails(OSError("No space left on device")))
    else:
        (tmp_path / "fedkernels").write_text("a file and no folder")
    for _ in range(2):
        assert serves("nt_xent")
        assert serves("two_views")
        machine.new_process()
    assert machine.tested == [ALL] * 2
    assert all(path.suffix != ".json" and path.stat().st_size < 30 for path in tmp_path.rglob("*") if path.is_file())


def test_a_relative_cache_is_not_used(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert serves()
    (file,) = machine.files()
    assert tmp_path / "home/.cache/fedkernels" in file.parents


def test_the_card_and_the_build_are_known(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties)
    assert self_test_outcomes.card_of(0)[:2] == ("NVIDIA H200", "9.0")
    assert (len(self_test_outcomes.build()) == 64) == (native.module is not None)


def test_the_environment_turns_it_off(machine, monkeypatch):
    self_test_outcomes.save(CARD, {"nt_xent": Result(CARD.name, "nt_xent", FAILED, "wrong")})
    monkeypatch.setenv("FEDKERNELS_SELF_TEST", "0")
    assert serves("nt_xent")
    assert not machine.tested


def test_tensors_on_the_cpu_never_come_here(monkeypatch):
    monkeypatch.setattr(native, "_serves", fails(AssertionError()))
    fedkernels.client_weights(torch.eye(3))


def test_build_info_tells_what_is_tested(machine):
    assert native._self_tests_of(0) == f"not yet {ALL}"
    machine.child(of_nt_xent='tell(name, "FAILED", "wrong", 0.1)')
    assert serves()
    self_test_outcomes.save(CARD, {"nt_xent": Result(CARD.name, "nt_xent", FAILED, "wrong")})
    for _ in range(2):
        assert native._self_tests_of(0) == "tested client_weights two_views, failed nt_xent (wrong)"
        machine.new_process()


# What a child does


@pytest.mark.parametrize(
    ("kernel", "reference", "outcome"),
    [
        (RuntimeError("misaligned address"), None, FAILED),
        (RuntimeError("CUDA error: out of memory"), None, NOT_TESTED),  # as where code is loaded
        (torch.OutOfMemoryError("CUDA out of memory"), None, NOT_TESTED),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), None, NOT_TESTED),
        (None, RuntimeError("no such function"), NOT_TESTED),
        (None, None, PASSED),
    ],
)
def test_an_error_of_the_kernel_fails_and_no_memory_does_not(monkeypatch, kernel, reference, outcome):
    one = torch.ones(2)
    functions = [fails(error) if error else lambda x: [x] for error in (kernel, reference)]
    case = self_test_cases.Case("float32", [one], *functions, 1e-5)
    monkeypatch.setattr(self_test_cases, "cases_of", lambda *_: iter([case]))
    found, reason = self_test_process.run("info_nce", torch.device("cpu"))
    assert found == outcome
    assert (reason == "") == (outcome == PASSED)


@pytest.mark.parametrize(("works", "told"), [(True, 2), (False, 1)])
def test_a_child_ends_where_cuda_is_broken(monkeypatch, capsys, works, told):
    monkeypatch.setattr(self_test_process, "_open", lambda gpu: torch.device("cpu"))
    monkeypatch.setattr(self_test_process, "_still_works", lambda device: works)
    monkeypatch.setattr(self_test_process, "run", lambda operator, device: (FAILED, "an illegal memory access"))
    monkeypatch.setattr(self_test_process.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(self_test_outcomes, "card_of", lambda gpu: CARD)
    self_test_process.run_as_child(0, ["info_nce", "nt_xent"])
    mark = "fedkernels.self_test: "
    card, *results = (json.loads(one.removeprefix(mark)) for one in capsys.readouterr().out.split("\n") if mark in one)
    assert Card(*card) == CARD
    assert [Result(CARD.name, *one)[:4] for one in results] == [
        (CARD.name, name, FAILED, "an illegal memory access") for name in ("info_nce", "nt_xent")[:told]
    ]


def test_a_child_imports_what_this_process_has(monkeypatch):
    monkeypatch.syspath_prepend("/added")
    program = (
        "import importlib.util, json, sys; file = importlib.util.find_spec('fedkernels').origin; "
        "print('fedkernels.self_test: ' + json.dumps([sys.path, file]))"
    )
    ((folders, file),), code, _ = self_test_process._watch([sys.executable, "-c", program], 60)
    assert code == 0
    assert "/added" in folders
    assert file == fedkernels.__file__


def test_every_operator_has_cases_of_every_dtype():
    for operator in {*native.COMPILED} - native.CPU_ONLY:
        cases = list(self_test_cases.cases_of(operator))
        assert len({case.name for case in cases}) == len(cases)
        dtypes = {case.name.split(",")[0] for case in cases}
        if operator == "two_views":
            assert dtypes == {"float32", "bfloat16"}
        else:
            assert dtypes == {"float64", "float32", "bfloat16", "float16"}


def test_a_difference_is_told():
    case = self_test_cases.Case("float32", [], lambda: [], lambda: [], 1e-5, 1e-2)
    truth = torch.tensor([1.0, -4.0]).double()
    difference = self_test_cases.difference
    assert not difference(case, [truth.float(), truth * 1.009], [truth, truth])
    assert "result 1 of 2 is off by 9.0e-03" in difference(case, [truth * 1.009, truth], [truth, truth])
    assert "result 2 of 2 is off by 1.1e-02" in difference(case, [truth, truth * 1.011], [truth, truth])
    assert "off by nan" in difference(case, [truth * torch.nan], [truth])
    assert "shape [1], expected [2]" in difference(case, [truth[:1]], [truth])
    assert difference(case, [truth], [0 * truth])


@pytest.mark.parametrize("outcome", [None, PASSED, FAILED])
def test_the_command_prints_a_table_and_ends_with_1_after_a_failure(machine, monkeypatch, capsys, outcome):
    """What `python -m fedkernels.self_test` does; without a GPU there is nothing to test."""
    monkeypatch.setattr(sys.modules["fedkernels.self_test"], "_gpus", lambda: [0] if outcome else [])
    machine.child(of_nt_xent=f'tell(name, "{outcome}", "it hangs", 0.31)')
    monkeypatch.setattr(sys, "argv", ["self_test"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedkernels.self_test", run_name="__main__")
    assert ended.value.code == (outcome == FAILED)
    first, *others = capsys.readouterr().out.splitlines()
    if outcome is None:
        assert first.startswith("No CUDA kernels to test")
    else:
        assert others[1].split()[2:] == ["nt_xent", outcome, "0.3", "s", "it", "hangs"]


@pytest.mark.gpu
def test_all_kernels_pass():
    assert {result.outcome for result in fedkernels.self_test()} == {PASSED}
