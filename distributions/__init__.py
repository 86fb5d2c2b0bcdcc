"""The two packages as distributions of their own. `make wheels` builds them."""
