"""A part file."""

OWN_PART = '''"""A term of one's own."""

from pydantic import Field

from fedssl.regularizers.base import Regularizer


class Own(Regularizer):
    """Adds nothing.

    It is for a test.
    """

    strength: float = Field(0.5, ge=0, description="how much of nothing")

    def start_round(self, local):
        return lambda step: step.loss.new_zeros(())
'''
