"""Rounds of a method without an engine: no folder, no evaluation, every message at hand."""

from collections.abc import Callable
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
        servers: the server's state before each round, and after the last one as that before the next.
    """

    server: Message
    clients: dict[int, Message]
    sent: dict[int, dict[int, Message]] = field(default_factory=dict)
    replies: dict[int, dict[int, Message]] = field(default_factory=dict)
    servers: dict[int, Message] = field(default_factory=dict)


Join = Callable[[Message, dict[int, Message], int], Message]


def train_rounds(
    federation: Federation, rounds: int, clients: list[int] | None = None, join: Join | None = None
) -> Rounds:
    """Run the opening round, where the method has one, and so many rounds after it, of all clients or of some.

    `join` makes the server's next state of its last one and the answers; by default the method's `aggregate` does.
    """
    method, asked = federation.method, clients or list(range(len(federation.client_rows)))
    done = Rounds(method.initial_state(), {k: Message() for k in asked})
    for number in range(0 if method.opening_round else 1, rounds + 1):
        done.servers[number] = done.server
        if number:
            done.sent[number] = method.broadcast(done.server, asked, number)
        else:
            done.sent[number] = method.broadcast_opening(done.server, asked)
        done.replies[number] = {}
        for k in asked:
            client = federation.client(k, done.clients[k])
            done.replies[number][k] = method.client_round(client, done.sent[number][k], number)
            done.clients[k] = federation.client_state(client, number)
        done.server = done.servers[number + 1] = (join or method.aggregate)(done.server, done.replies[number], number)
    return done
