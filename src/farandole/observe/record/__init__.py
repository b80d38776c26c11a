"""Recording while a run trains: events to rows, host samples, traffic, progress."""
