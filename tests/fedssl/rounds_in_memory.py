"""Rounds of a method without an engine: no folder, no evaluation, every message at hand."""

from dataclasses import dataclass, field

from fedssl.federation import Federation
from fedssl.messages import Message


@dataclass
class Rounds:
    """What some rounds left.

    Attributes:
        server: the server's state after the last round.
        clients: the clients' states after the last round, by client.
        sent, replies: what went down and up, by round (0 is the opening one) and client.
    """

    server: Message
    clients: dict[int, Message]
    sent: dict[int, dict[int, Message]] = field(default_factory=dict)
    replies: dict[int, dict[int, Message]] = field(default_factory=dict)


def train_rounds(federation: Federation, rounds: int, clients: list[int] | None = None) -> Rounds:
    """Run the opening round, where the method has one, and so many rounds after it, of all clients or of some."""
    method, asked = federation.method, clients or list(range(len(federation.client_rows)))
    done = Rounds(method.initial_state(), {k: Message() for k in asked})
    for number in range(0 if method.opening_round else 1, rounds + 1):
        if number:
            done.sent[number] = method.broadcast(done.server, asked, number)
        else:
            done.sent[number] = method.broadcast_opening(done.server, asked)
        done.replies[number] = {}
        for k in asked:
            client = federation.client(k, done.clients[k])
            done.replies[number][k] = method.client_round(client, done.sent[number][k], number)
            done.clients[k] = federation.client_state(client, number)
        done.server = method.aggregate(done.server, done.replies[number], number)
    return done
