"""Pipeline schedules as data: lists of actions that are validated, simulated, drawn and executed."""
