"""Warnings about trainings that run but are not distributed as meant."""
