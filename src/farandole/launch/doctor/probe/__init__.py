"""Asking hosts for facts and measuring the links between them."""
