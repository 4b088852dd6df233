"""Pipeline schedules as plain data, and running them: what a device does, and when."""
