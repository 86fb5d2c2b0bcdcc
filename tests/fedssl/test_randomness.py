import torch

from fedssl.randomness import generator_for, seed_for, seeded


def test_seeds_are_fixed_for_all_time():
    """A changed value would silently change every published run."""
    assert seed_for(0, "client", 3, "round", 7, "augmentation") == 6297883779828368072
    assert seed_for(0) != seed_for(1)
    assert seed_for(0, "client", 1) != seed_for(0, "client", 11)


def test_streams_of_different_purposes_differ_and_repeat():
    a, b, c = (torch.rand(4, generator=generator_for(0, p)) for p in ("order", "augmentation", "order"))
    assert torch.equal(a, c)
    assert not torch.equal(a, b)


def test_seeded_puts_the_global_generator_back():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with seeded(0, "model"):
        torch.rand(100)
    assert torch.equal(torch.rand(2), expected)
