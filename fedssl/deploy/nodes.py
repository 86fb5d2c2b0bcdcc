"""Flower's two processes with safe settings: `fedssl superlink` and `fedssl supernode`.

The reverse proxy in front of the SuperLink (nginx) limits all requests; of answers the SuperLink has limits of its own.
Flower takes one in any site's name and of any number of pieces, each of which is work for its database.
"""

import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from flwr.app.error import Error
from flwr.app.message import make_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.superlink.servicer.fleet import fleet_handlers

from ..engines.flower.messenger import REFUSED_BY_SUPERLINK
from ..engines.flower.site_files import MANIFEST, SITES, VARIABLE, load_site
from ..errors import UserError
from ..run_folder.creation import alone_in
from ..untrusted import expand_home, printable
from .certificates import require_authority, require_server
from .flower_commands import fork, run
from .keys import read_site_key, require_own

#: modules that a ServerApp or ClientApp needs; importing them starts no threads and looks for no CUDA device
_APP_MODULES: tuple[str, ...] = ("fedssl.engines.flower.server", "fedssl.engines.flower.client", "sklearn.datasets")
_APP_MODULES += ("timm", "torch._dynamo")  # the last is imported by the first optimizer that is made
#: objects of an answer: records, arrays and the arrays' pieces of 5 MiB; also limits the database's work
MOST_OBJECTS = 1000
_HOST = "127.0.0.1"  # where the SuperLink and a SuperNode listen for processes of this machine
_push_messages = fleet_handlers.push_messages
_PRIVATE_UMASK = 0o077  # the files of these processes, and of those that they start, are for their user alone


def superlink(folder: Path, port: int) -> int:
    """Run Flower's SuperLink on 127.0.0.1 until it ends or this process is terminated; return its exit code.

    It uses TLS and accepts only sites that authenticate themselves. Other machines reach it through a reverse proxy
    alone.

    Args:
        folder: holds ca.crt, server.crt and server.key, and keeps the SuperLink's database.
        port: where it listens.

    Raises:
        UserError: see `require_server`; another SuperLink keeps its database in the folder.
    """
    os.umask(_PRIVATE_UMASK)
    folder = folder.absolute()
    authority, certificate, key = (folder / name for name in ("ca.crt", "server.crt", "server.key"))
    require_server(certificate, key, authority)
    database = folder / "superlink.db"
    if database.exists():  # it also holds the registered keys
        require_own(database)
    command = ["flower-superlink", "--host", _HOST, "--port", str(port), "--database", str(database)]
    command += ["--disable-runtime-dependency-installation"]  # it would call uv, which needs the network
    command += ["--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    command += ["--enable-supernode-auth"]
    starter = ["--runtime-api-address", f"{_HOST}:{port}", "--root-certificates", str(authority)]
    with alone_in(folder, "another SuperLink keeps its database in this folder: stop it, or name another folder"):
        fleet_handlers.push_messages = push_messages
        return run(command, starter, {VARIABLE: str(folder / SITES / MANIFEST)}, _APP_MODULES)


def push_messages(request: PushMessagesRequest, state: Any) -> PushMessagesResponse:
    """Handle a site's announcement of an answer as Flower does, with limits.

    An answer of too many objects is replaced by an error with the reason, so that the run does not wait for it.

    Raises:
        HTTPException: the answer is another site's, or not the one whose objects are announced.
    """
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise HTTPException(400, "expected one message and its objects")
    [message], [tree] = request.messages_list, request.message_object_trees
    if message.metadata.src_node_id != request.node.node_id:
        raise HTTPException(403, "a site may answer in its own name only")
    if message.metadata.message_id != tree.object_id:
        raise HTTPException(400, "the objects are not those of the message")
    objects = [tree]
    for node in objects:  # the list grows by every node's children; recursion would be limited
        objects.extend(node.children)
    if len(objects) <= MOST_OBJECTS:
        return _push_messages(request, state)
    reason = f"its answer has {len(objects)} pieces, more than {MOST_OBJECTS}, the most that the SuperLink takes"
    refusal = make_message(message_from_proto(message).metadata, error=Error(REFUSED_BY_SUPERLINK, reason))
    refusal.metadata.__dict__["_message_id"] = refusal.object_id
    answer = PushMessagesRequest(
        node=request.node,
        messages_list=[message_to_proto(refusal)],
        message_object_trees=[get_object_tree(refusal)],
    )
    response = _push_messages(answer, state)
    state.store_object(message.metadata.run_id, response.session_id, refusal.object_id, refusal.deflate())
    return PushMessagesResponse(results={message.metadata.message_id: 0}, session_id=response.session_id)


def supernode(site_file: Path, address: str, certificate: Path, key: Path, allowed_apps: Sequence[str] = ()) -> int:
    """Run Flower's SuperNode for a site until it ends or this process is terminated; return its exit code.

    Args:
        site_file: is checked, and its data are loaded, before anything is started.
        address: of the SuperLink, as host:port.
        certificate: of the authority that has signed the SuperLink's certificate.
        key: the site's private key, whose public part the SuperLink knows.
        allowed_apps: digests of apps that may run here besides those that the site's file approves. Any app may run
            if neither the file nor this approves one.

    Raises:
        UserError: see `require_authority` and `require_digest`; a file is missing or wrong, or the address has another
            form.
    """
    os.umask(_PRIVATE_UMASK)
    if not re.fullmatch(r"[^/\s]+:[0-9]+", address):  # Flower would try to connect to it for ever
        raise UserError(f"--superlink is the SuperLink's address as HOST:PORT, got {printable(address)!r}")
    require_authority(certificate)
    read_site_key(key)
    with socket.create_server((_HOST, 0)) as probe:  # a free port, as several nodes may share a machine
        port = str(probe.getsockname()[1])
    command = ["flower-supernode", "--superlink", address, "--port", port]
    command += ["--node-config", f"site={json.dumps(str(site_file.absolute()))}"]
    command += ["--root-certificates", str(certificate.absolute()), "--auth-supernode-private-key", str(key.absolute())]
    # in a copy, because this process only waits for runs: what it has imported would stay in memory
    if os.waitpid(fork(lambda: _check_data(site_file)), 0)[1]:
        return 2
    # Flower looks for a new message's task every second; a round has several such steps one after another
    environment = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3"}
    starter = ["--runtime-api-address", f"{_HOST}:{port}", "--insecure"]
    if load_site(site_file).approved_apps is None and not allowed_apps:
        advice = "approve single apps with --allow or approved_apps in the site's file"
        _print_error(f"every app that the server sends runs at this site; {advice}")
    else:
        from .apps import refuse_other_apps, require_approved, require_digest

        refuse_other_apps(partial(require_approved, site_file.absolute(), [*map(require_digest, allowed_apps)]))
    # Flower installs an app into a folder whose name has 8 digits of the digest, and trusts a folder that is there
    # already: so only apps that this process has approved may be there.
    with tempfile.TemporaryDirectory(prefix="fedssl-") as home:
        code = run(command, starter, environment | {"FLWR_HOME": home}, _APP_MODULES)
    if code == 0:  # as Flower ends where it is stopped, and where the SuperLink no longer accepts its requests
        now = datetime.now(timezone.utc)
        _print_error(
            "the site ends. If nobody has stopped it, the server does not accept this site: its key is not registered "
            f"or was revoked, or this machine's clock ({now:%Y-%m-%d %H:%M:%S} UTC) differs from the server's by more "
            "than a few seconds; the server's operator knows both"
        )
    return code


def _check_data(site_file: Path) -> int:
    """Load the site's data and make its state folder, as its apps will; return an exit code."""
    from ..engines.flower.site import count_own_images

    try:
        site = load_site(site_file)
        if (count := count_own_images(site)) is not None:
            print(f"fedssl: this site has {count:,} training images; it waits for runs", flush=True)
        expand_home(site.state).mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as error:
        _print_error(str(error))
        return 2
    return 0


def _print_error(text: str) -> None:
    print(f"fedssl: {printable(text)}", file=sys.stderr, flush=True)
