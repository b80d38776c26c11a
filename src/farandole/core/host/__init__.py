"""What the kernel says about this host: interfaces, sockets, stacks, paths."""
