"""All tests here compute with one thread; the native loops are there before the first."""

from tests.native import patient_compiler
from tests.threads import one_thread

__all__ = ["one_thread", "patient_compiler"]
