"""The process that writes a rank's files, and its client in the rank. No torch in either."""
