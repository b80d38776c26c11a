"""Which operations all members have submitted, whether they agree, and in which order they run."""
