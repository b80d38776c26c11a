"""What launchers say to the processes that they start: asked in turn."""
