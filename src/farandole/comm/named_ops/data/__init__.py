"""Moving the tensors of named operations."""
