"""`python -m plurax.cli`, the same as `plurax`."""

from plurax.cli.commands import main

main()
