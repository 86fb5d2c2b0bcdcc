"""Partial participation: who is sampled, who answers, and that the server joins those alone."""

from __future__ import annotations

import pytest
import torch

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.test_in_process import contents, metric

MANY = {
    "data": {"name": "digits", "test_limit": 20},
    "partition": {"name": "dirichlet_equal", "clients": 100, "alpha": 0.5, "min_samples": 8},
    "clients_per_round": 25,
}


class Stopped(BaseException):
    pass


class StopAfterRoundOne(Observer):
    def round_ended(self, round_number, rows):
        if round_number == 1:
            raise Stopped


@pytest.mark.parametrize("dropout", [0.25, 0.5])
def test_clients_drop_out_with_their_probability_by_their_own_draw(tiny, dropout):
    federation = build_federation(tiny(**AVERAGED, **MANY, client_dropout=dropout))
    sampled = {number: federation.sampled_clients(number) for number in range(1, 101)}
    answering = {number: federation.answering_clients(number, chosen) for number, chosen in sampled.items()}
    assert all(set(answering[number]) <= set(chosen) for number, chosen in sampled.items())
    assert len({tuple(who) for who in answering.values()}) == 100
    share = sum(map(len, answering.values())) / 2500
    assert share == pytest.approx(1 - dropout, abs=0.03)  # three standard deviations
    # a client's draw does not depend on who else was sampled
    for number in (1, 2):
        for k in sampled[number]:
            assert federation.answering_clients(number, [k]) == [k] * (k in answering[number])


def test_the_server_joins_those_who_answered_by_their_samples(tiny, tmp_path):
    partition = {"name": "dirichlet", "clients": 3, "min_samples": 8, "alpha": 1.0}
    recipe = tiny(**AVERAGED, rounds=1, partition=partition, client_dropout=0.4, seed=3)
    federation = build_federation(recipe)
    answering = federation.answering_clients(1, [0, 1, 2])
    assert len(answering) == 2
    directory = run(recipe, tmp_path / "a")
    sizes = {k: len(federation.client_rows[k]) for k in answering}
    assert len(set(sizes.values())) == 2  # otherwise a mean without samples would be the same
    states = {k: directory.client_state(k).tensors for k in answering}
    for name, mean in directory.server_state().tensors.items():
        if mean.is_floating_point():
            expected = sum(n * states[k]["model/" + name].double() for k, n in sizes.items()) / sum(sizes.values())
            torch.testing.assert_close(mean.double(), expected, atol=1e-6, rtol=1e-6)
    (absent,) = {0, 1, 2} - set(answering)
    assert metric(tmp_path / "a", "dropped", 1) == {str(absent): 1.0}
    assert metric(tmp_path / "a", "answers", 1) == {"global": 2.0}
    assert metric(tmp_path / "a", "bytes_down", 1).keys() == {"0", "1", "2"}
    assert metric(tmp_path / "a", "bytes_up", 1).keys() == set(map(str, answering))
    assert not directory.client_state(absent).tensors


@pytest.mark.parametrize("dropout", [0.25, 0.5])
def test_a_quarter_of_100_clients_with_dropout_is_reproducible_and_resumes(tiny, tmp_path, dropout):
    recipe = tiny(**AVERAGED, **MANY, client_dropout=dropout)
    run(recipe, tmp_path / "a")
    with pytest.raises(Stopped):
        run(recipe, tmp_path / "b", StopAfterRoundOne())
    resume(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    federation = build_federation(recipe)
    for number in (1, 2):
        sampled = federation.sampled_clients(number)
        answering = federation.answering_clients(number, sampled)
        assert 0 < len(answering) < 25
        assert metric(tmp_path / "a", "bytes_up", number).keys() == set(map(str, answering))
        assert metric(tmp_path / "a", "bytes_down", number).keys() == set(map(str, sampled))


@pytest.mark.parametrize("kind", [AVERAGED, ALIGNED], ids=["averaged", "aligned"])
def test_a_round_in_which_nobody_answers_changes_nothing(tiny, tmp_path, kind):
    recipe = tiny(**kind, clients_per_round=1, client_dropout=0.9, rounds=3)
    federation = build_federation(recipe)
    answered = {
        number: federation.answering_clients(number, federation.sampled_clients(number)) for number in (1, 2, 3)
    }
    assert not any(answered.values())
    directory = run(recipe, tmp_path / "a")
    first = federation.method.initial_state()
    server = directory.server_state()
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in first.tensors.items())
    assert metric(tmp_path / "a", "answers", 3) == {"global": 0.0}
    assert metric(tmp_path / "a", "loss", 3) == {}
    assert RunDirectory.open(tmp_path / "a").checkpoint.finished


def test_a_probability_of_one_is_refused(tiny):
    with pytest.raises(UserError, match=r"client_dropout: input should be less than 1, got 1"):
        tiny(**AVERAGED, client_dropout=1)
