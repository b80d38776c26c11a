"""Front ends for those who do not own their training loop: transformers, Lightning, Accelerate, and notebooks.

One module for each package. The package is imported with its module, and a missing one is an ImportError that says
what to install.
"""
