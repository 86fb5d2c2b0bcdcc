"""Which sites are connected to the server: `fedssl doctor --consortium FOLDER` with the server's folder."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import httpx
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.node_pb2 import NodeInfo

from ..errors import UserError
from .consortium import Member
from .registered_keys import operators_client

_FORM = "%Y-%m-%d %H:%M:%S UTC"


def connected_sites(member: Member, folder: Path) -> list[tuple[str, str, bool]]:
    """Ask the running SuperLink for its sites, on its own machine: the name, a finding, and whether it is connected.

    Raises:
        UserError: the SuperLink is not reached, or refuses.
    """
    address = member.server.superlink
    try:
        with operators_client(address, folder / "ca.crt") as client:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise UserError(
            f"the SuperLink at {address} is not reached: {' '.join(str(error).split())}; start it with start.sh, and "
            "call this on its machine"
        ) from error
    registered = sorted((node for node in nodes if node.status != "unregistered"), key=lambda node: node.name)
    return [(node.name or f"node {node.node_id}", *_finding(node)) for node in registered]


def _finding(node: NodeInfo) -> tuple[str, bool]:
    if node.status == "online":
        return f"connected since {_time(node.last_activated_at):{_FORM}}", True
    if not node.last_activated_at:
        return f"never connected; its key was registered {_time(node.registered_at):{_FORM}}", False
    # a site that ends signs off; one that was cut off counts as connected until it has been silent for some time
    gone = _time(node.last_deactivated_at) if node.last_deactivated_at else None
    if gone is None or gone < _time(node.last_activated_at):
        gone = datetime.fromtimestamp(node.online_until, timezone.utc)
    return f"not connected since {gone:{_FORM}}", False


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(timezone.utc)
