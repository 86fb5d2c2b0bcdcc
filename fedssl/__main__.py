"""`python -m fedssl` is `fedssl`."""

from .cli import main

main()
