"""Trainings by `fit`, watched: seeds of each rank, warnings about mistakes, and ``farandole verify``."""
