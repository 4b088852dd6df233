"""Find a plan: the shard strategies of a step, their costs, and the solver."""
