"""Rounds of a method without an engine: no folder, no evaluation, every message at hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedssl.federation import Federation
from fedssl.messages import Message


@dataclass
class Rounds:
    """What some rounds left.

    Attributes:
        server: the server's state after the last round.
        clients: the clients' states after the last round, by client.
        replies: by round (0 is the opening one) and client.
    """

    server: Message
    clients: dict[int, Message]
    replies: dict[int, dict[int, Message]] = field(default_factory=dict)


def train_rounds(federation: Federation, rounds: int) -> Rounds:
    """Run the opening round, where the method has one, and so many rounds of all clients after it."""
    method, everyone = federation.method, list(range(len(federation.client_rows)))
    done = Rounds(method.initial_state(), {k: Message() for k in everyone})
    for number in range(0 if method.opening_round else 1, rounds + 1):
        if number:
            sent = method.broadcast(done.server, everyone, number)
        else:
            sent = method.broadcast_opening(done.server, everyone)
        done.replies[number] = {}
        for k in everyone:
            client = federation.client(k, done.clients[k])
            reply = method.client_round(client, sent[k], number)
            done.clients[k] = federation.client_state(client, number)
            done.replies[number][k] = reply
        done.server = method.aggregate(done.server, done.replies[number], number)
    return done
