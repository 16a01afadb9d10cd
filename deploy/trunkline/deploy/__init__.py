"""The parts that people run: the command line, the supervisor, the demo model."""
