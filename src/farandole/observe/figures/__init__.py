"""The figures of a run: one definition of a step's parts, of waits and of the closing summary."""
