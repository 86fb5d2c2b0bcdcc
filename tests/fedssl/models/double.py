"""Training in float64, so that the order of sums does not matter."""

from fedssl.models.model import Model


def to_double(model: Model) -> None:
    """Make a model, and copies of it, compute in float64; their views may be float32."""
    model.double()
    for networks in (model.online, model.target):
        if "encoder" in networks:
            networks["encoder"].register_forward_pre_hook(lambda network, inputs: (inputs[0].double(),))
