"""What launchers say to the processes that they start: one file a launcher, asked in turn."""
