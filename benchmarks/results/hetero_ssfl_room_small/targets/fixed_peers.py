"""Each client sends, once, the kernel factor of an encoder that it trained alone before."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field

from fedssl.aggregators.representation_mean import RepresentationMean
from fedssl.client import LocalRound
from fedssl.data.pixels import normalize
from fedssl.export.trained_encoder import encoder_of_run
from fedssl.messages import Message


class FrozenPeers(RepresentationMean):
    run: str = Field("", description="run of local training")

    @torch.no_grad()
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        message = super().collect(local, travelling)
        if local.number == 0:
            encoder = encoder_of_run(Path(self.run), local.client.index, trust=True).encoder.network
            public = local.client.public_images
            assert public is not None
            a, _ = self._factor(torch.cat([encoder(normalize(b)) for b in public.split(500)]))
            return Message({f"representation.{local.client.index}": a})
        return message
