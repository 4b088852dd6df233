"""Obeys a plan: joins a task, an optimizer and a plan into a program, and runs it."""
