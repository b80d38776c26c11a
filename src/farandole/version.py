"""The version of the package, in one place. CHANGELOG.md is checked against it."""

VERSION = "0.3.0"
