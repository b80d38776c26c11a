"""The gradient noise scale, measured while a model trains."""
