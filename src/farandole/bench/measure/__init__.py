"""Measuring: intervals, links, warm-up, machine facts, ranks on hosts."""
