"""Parameter servers: processes that hold state for all ranks, and go on when a rank dies."""
