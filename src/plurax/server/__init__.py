"""Parameter servers: workers compute gradients, servers hold and update parameters."""
