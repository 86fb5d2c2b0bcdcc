"""What fedssl uses or replaces of Flower that is not Flower's public interface, each with its reason.

A version of Flower that moves one of these fails here by name. Flower 1.42 has all of them unchanged, and a public hook
in place of none.
"""

import inspect
from importlib import metadata
from pkgutil import resolve_name

import pytest

PULL = "state object_store node_config receive get_run get_fab pull_object confirm_message_received trusted_entities"
APPROVED = "approved apps: Flower's trusted entities sign apps, a site approves digests"
#: name; its parameters, or None where it is no function; why
INTERNALS = [
    ("superlink.servicer.fleet.fleet_handlers.push_messages", "request state", "limits of an answer"),
    ("supernode.start_client_internal._pull_and_store_message", PULL, APPROVED),
    ("supernode.start_client_internal._insert_message", "msg state store", "the refusal of an app"),
    ("supercore.superexec.executor.subprocess_executor.subprocess", None, "apps are forked, which saves imports"),
    ("supercore.task_identity.TaskIdentity", None, "messages of a simulation, which has no SuperLink"),
    ("superlink.grid.http_grid.HttpGrid._runtime_client", None, "the size of an answer, while it arrives"),
    ("supercore.runtime.RuntimeHttpClient.PullMessages", "self request", "the same"),
    ("supercore.runtime.RuntimeHttpClient.PullObject", "self request", "the same"),
]
#: commands whose work forked processes do
COMMANDS = ["flower-superlink", "flower-supernode", "flower-superexec", "flwr-clientapp", "flwr-serverapp"]


@pytest.mark.parametrize(("name", "parameters", "why"), INTERNALS, ids=[row[0] for row in INTERNALS])
def test_what_flower_does_not_promise_is_where_it_was(name, parameters, why):
    found = resolve_name(f"flwr.{name}")
    if parameters is not None:
        assert [*inspect.signature(found).parameters] == parameters.split(), f"flwr.{name}, for: {why}"


def test_flowers_commands_have_their_names():
    names = {entry.name for entry in metadata.distribution("flwr").entry_points}
    assert names.issuperset(COMMANDS)
