"""Clients train alone for some rounds, then align to the kernels that they had then."""

from __future__ import annotations

from pydantic import Field

from fedssl.aggregators.representation_mean import RepresentationMean as Base
from fedssl.messages import Message

ROUND = "alignment.round"


class RepresentationMean(Base):
    alone: int = Field(0, ge=0)

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        if server.numbers.get(ROUND, 0) <= self.alone:
            return dict.fromkeys(clients, self._message([], []))
        return super().broadcast(server, clients, travelling)

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        count = server.numbers.get(ROUND, 0) + 1
        state = super().aggregate(server, replies) if count <= self.alone + 1 else Message()
        state.numbers[ROUND] = count
        return state
