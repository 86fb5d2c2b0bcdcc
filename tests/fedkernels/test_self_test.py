"""When an operator is tested on a GPU, what is kept of it, and what is told. tests/cuda_on_cpu tests the cases."""

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

import fedkernels
from fedkernels.internal import first_contact, native, self_test_cases, self_test_outcomes
from fedkernels.internal.self_test_outcomes import Card, Outcome
from fedkernels.self_test import FAILED, NOT_TESTED, PASSED, Result, table

CARD = Card("Some card", "9.0", "driver 1")
BROKEN = Outcome("nt_xent", False, "bfloat16: result 1 of 3 is off by nan")


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """A machine with one GPU, on which all operators but nt_xent pass. -> the names of those that were tested"""
    ran = []

    def run(operator, gpu):
        ran.append(operator)
        time.sleep(0.05)
        return (BROKEN if operator == "nt_xent" else Outcome(operator, True)), True

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDKERNELS_SELF_TEST", raising=False)
    monkeypatch.setattr(native, "runs_on", lambda gpu: True)
    monkeypatch.setattr(self_test_outcomes, "build", lambda: "digest")
    monkeypatch.setattr(self_test_outcomes, "card_of", lambda gpu: CARD)
    monkeypatch.setattr(first_contact, "_is_captured", lambda gpu: False)
    monkeypatch.setattr(first_contact, "run", run)
    new_process(monkeypatch)
    return ran


def new_process(monkeypatch):
    for name, empty in (("verdicts", {}), ("_reasons", {}), ("_warned", set())):
        monkeypatch.setattr(first_contact, name, empty)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_first_use_tests_and_the_outcome_is_kept(runs, monkeypatch, tmp_path):
    assert native._serves("info_nce", 0, ())
    assert native._serves("info_nce", 0, ())
    assert runs == ["info_nce"]
    assert [path.name for path in files(tmp_path)] == ["info_nce.json"]
    new_process(monkeypatch)
    assert native._serves("info_nce", 0, ())
    assert native._serves("info_nce", 1, ())  # a second card of the kind
    assert runs == ["info_nce"]


def test_a_failure_is_told_once_in_each_process(runs, monkeypatch):
    for _ in range(2):
        with pytest.warns(UserWarning, match="self-test") as told:
            assert not native._serves("nt_xent", 0, ())
        assert len(told) == 1
        for part in ("fedkernels.nt_xent", "cuda:0 (Some card)", BROKEN.reason, "Please report"):
            assert part in str(told[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not native._serves("nt_xent", 0, ())
        new_process(monkeypatch)
    assert runs == ["nt_xent"]


@pytest.mark.parametrize(
    "other", [CARD._replace(name="Another"), CARD._replace(capability="8.0"), CARD._replace(driver="driver 2")]
)
def test_another_card_or_driver_is_tested_again(runs, monkeypatch, other):
    native._serves("info_nce", 0, ())
    new_process(monkeypatch)
    monkeypatch.setattr(self_test_outcomes, "card_of", lambda gpu: other)
    native._serves("info_nce", 0, ())
    assert runs == ["info_nce"] * 2


def test_another_build_is_tested_again(runs, monkeypatch):
    native._serves("info_nce", 0, ())
    new_process(monkeypatch)
    monkeypatch.setattr(self_test_outcomes, "build", lambda: "another")
    native._serves("info_nce", 0, ())
    assert runs == ["info_nce"] * 2


@pytest.mark.parametrize(
    "contents",
    [b"", b"{", b"[1]", b"\xff", b"{}", b'{"passed": true, "reason": ""}', b"[" * 100_000, b'{"passed": "yes"}'],
)
def test_a_broken_file_counts_as_not_tested_and_is_replaced(runs, monkeypatch, tmp_path, contents):
    native._serves("info_nce", 0, ())
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(contents)
    new_process(monkeypatch)
    assert native._serves("info_nce", 0, ())
    assert runs == ["info_nce"] * 2
    assert file.read_bytes() == whole


def test_a_file_of_another_card_counts_as_not_tested(runs, tmp_path):
    native._serves("info_nce", 0, ())
    (file,) = files(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "driver": "driver 3"}))
    assert self_test_outcomes.load(CARD, "info_nce") is None


def test_where_nothing_can_be_kept_each_process_tests(runs, monkeypatch, tmp_path):
    (tmp_path / "fedkernels").write_text("a file and no folder")
    for _ in range(2):
        assert native._serves("info_nce", 0, ())
        assert native._serves("info_nce", 0, ())
        new_process(monkeypatch)
    assert runs == ["info_nce"] * 2


def test_a_write_that_fails_leaves_nothing(runs, monkeypatch, tmp_path):
    def no_room(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", no_room)
    assert native._serves("info_nce", 0, ())
    assert not files(tmp_path)


def test_a_relative_cache_is_not_used(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    native._serves("info_nce", 0, ())
    assert all(tmp_path / "home/.cache/fedkernels" in path.parents for path in files(tmp_path))
    assert files(tmp_path)


def test_a_card_is_described(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties)
    card = self_test_outcomes.card_of(0)
    assert card[:2] == ("NVIDIA H200", "9.0")
    assert "CUDA " in card.driver


def test_the_build_is_known():
    assert (len(self_test_outcomes.build()) == 64) == (native.module is not None)


def test_a_test_may_wait_and_puts_the_device_back(monkeypatch):
    """With torch's functions pretended: there need not be a GPU."""
    modes, devices = ["error"], []

    @contextmanager
    def device(gpu):
        devices.append(gpu)
        yield

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "device", device)
    with first_contact._on(3) as there:
        assert there == torch.device("cuda", 3)
        assert modes[-1] == "default"
    assert modes[-1] == "error"
    assert devices == [3]


def test_a_capture_is_seen(monkeypatch):
    answers = iter([True, False, True, False, False])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(answers))
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext())
    assert first_contact._is_captured(1)
    assert first_contact._is_captured(1)
    assert not first_contact._is_captured(1)


def test_threads_test_an_operator_once(runs):
    threads = [threading.Thread(target=native._serves, args=("info_nce", 0, ())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == ["info_nce"]


def test_the_environment_turns_it_off(runs, monkeypatch):
    self_test_outcomes.save(CARD, BROKEN)
    monkeypatch.setenv("FEDKERNELS_SELF_TEST", "0")
    assert native._serves("info_nce", 0, ())
    assert native._serves("nt_xent", 0, ())
    assert not runs


def test_tensors_on_the_cpu_never_come_here(monkeypatch):
    def no_test(*_):
        raise AssertionError

    monkeypatch.setattr(native, "_serves", no_test)
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    fedkernels.info_nce(x, y, 0.5)
    fedkernels.linear_cka(x, y)
    fedkernels.client_weights(x @ x.T)
    fedkernels.delta_gram([x], [[y]])


def test_build_info_tells_what_is_tested(runs, monkeypatch):
    monkeypatch.setattr(native, "CUDA", frozenset({"info_nce", "nt_xent", "two_views"}))
    native._serves("info_nce", 0, ())
    with pytest.warns(UserWarning, match="self-test"):
        native._serves("nt_xent", 0, ())
    for _ in range(2):
        assert native._self_tests_of(0) == f"tested info_nce, failed nt_xent ({BROKEN.reason}), not yet two_views"
        new_process(monkeypatch)


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


def test_without_a_gpu_there_is_nothing_to_test():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "-m", "fedkernels.self_test"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("No CUDA kernels to test")
    assert done.stderr == ""


def test_the_table():
    results = [
        Result("Some card", "info_nce", PASSED, "", 0.31),
        Result("Some card", "nt_xent", FAILED, "it hangs", 60),
        Result("Some card", "two_views", NOT_TESTED, "no memory", 0),
    ]
    assert table(results).splitlines() == [
        "card       operator   outcome     time    reason",
        "Some card  info_nce   passed      0.3 s",
        "Some card  nt_xent    FAILED      60.0 s  it hangs",
        "Some card  two_views  not tested  0.0 s   no memory",
    ]


@pytest.mark.gpu
def test_all_kernels_pass():
    assert {result.outcome for result in fedkernels.self_test()} == {PASSED}
