"""`python -m plurax.cli`, the same as `plurax`."""

from plurax.cli import main

main()
