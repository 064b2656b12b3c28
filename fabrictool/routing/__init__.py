"""Pure request-level decisions, the same in the gateway and in the simulator: who may serve, and who does."""
