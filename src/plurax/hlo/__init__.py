"""Read compiled programs: their collectives, memory and schedule."""
