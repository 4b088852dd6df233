"""How a step runs: sharded, or in the stages of a pipeline."""
