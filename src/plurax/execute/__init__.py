"""Execute a plan: compile a task, an optimizer and a plan to a program, and run it."""
