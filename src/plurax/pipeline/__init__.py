"""Pipeline schedules as plain data, and the programs that run them on a mesh."""
