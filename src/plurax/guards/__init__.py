"""What keeps a run alive and sound: saving, rollback, replicas, the watchdog, signals."""
