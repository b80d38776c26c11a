"""Which ranks there are: rendezvous, groups, the store, and how blocked calls are aborted."""
