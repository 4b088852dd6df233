"""`python -m plurax`, the same as `plurax`."""

from plurax.cli import main

main()
