"""Compositions of layer and loss that keep less memory than the plain ones, and give the same."""
