"""Parameters that travel together: buckets, their state and their times."""
