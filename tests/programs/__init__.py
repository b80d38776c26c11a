"""Random training programs, played by ranks together and by one process alone: both must do the same."""
