"""A message with every kind of tensor, and whether a message that was stored or sent is still the same."""

import torch

from fedssl.messages import Message


def every_kind_of_tensor() -> Message:
    """Dtypes, shapes and strides that a state may have; the odd numbers of bytes come before larger entries."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 5, 7), generator=generator, dtype=torch.uint8)
    noise = torch.randn(6, 4, 3, 3, generator=generator)
    dtypes = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
    tensors = {f"as {dtype}": images.to(dtype) for dtype in dtypes}
    tensors |= {"a byte": images[0, 0, :1], "images": images, "noise": noise, "double": noise.double()}
    tensors |= {"scalar": torch.tensor(7), "empty": torch.empty(0, 3), "transposed": noise[0, 0].T}
    tensors |= {"channels last": noise.to(memory_format=torch.channels_last), "slice": noise[1:, 2]}
    tensors |= {"trains": noise.clone().requires_grad_(), "shared": noise, "cut": noise[:, :, 1:3]}
    tensors |= {"expanded": torch.ones(1, 3).expand(4, 3), "not finite": torch.tensor([float("nan"), float("inf")])}
    numbers, metrics = {"count": 3, "number": 0.1}, {"loss/3": 1e-300}
    return Message(tensors, numbers, {"text": '\u00e9 "quoted"', "switch": True, "rounds": 2, "t": 0.5}, metrics)


def assert_same(message: Message, expected: Message) -> None:
    assert (message.numbers, message.config, message.metrics) == (expected.numbers, expected.config, expected.metrics)
    assert [type(number) for number in message.numbers.values()] == [type(n) for n in expected.numbers.values()]
    tensors = {name: tensor.detach() for name, tensor in expected.tensors.items()}
    torch.testing.assert_close(message.tensors, tensors, rtol=0, atol=0, equal_nan=True)
