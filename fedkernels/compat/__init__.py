"""Losses and solvers of other libraries under their own names and signatures, computed by fedkernels' operators.

One module for each library, which does not need that library: ``from fedkernels.compat.open_clip import ClipLoss``.
Where a library's option has no operator here, a ValueError says so and names the original. The page "Use it in ..." of
the documentation shows the lines to change and what differs.
"""
