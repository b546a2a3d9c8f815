"""What can do the work: one module each, run in a process of its own."""
