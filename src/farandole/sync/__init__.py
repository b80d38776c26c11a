"""When replicas agree: local steps between meetings. Agreement in every step is `comm.engine`'s."""
