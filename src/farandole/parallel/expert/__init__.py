"""Mixture of experts: a layer, and the experts of any such layer divided over ranks."""
