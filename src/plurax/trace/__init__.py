"""One step as one device runs it, recorded once; bytes, memory and seconds are read from it."""
