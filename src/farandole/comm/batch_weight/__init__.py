"""The weight of this rank's batch in the mean over samples."""
