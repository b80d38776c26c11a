"""Facts about hosts and links as plain values, and what a finding is."""
