"""A small supervisor for the processes of a training run, on one host or several."""
