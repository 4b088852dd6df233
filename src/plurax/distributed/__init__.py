"""The boundary between one process and many: who this process is, what it owns, what all agree."""
