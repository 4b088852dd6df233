"""What training shows while it runs: lines, a bar on a terminal, a table in a notebook."""
