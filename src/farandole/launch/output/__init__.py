"""What ranks print: console prefixes, log files, progress."""
