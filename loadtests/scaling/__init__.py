"""How costs grow: latency with the load, memory with slots and context, start-up with the size."""
