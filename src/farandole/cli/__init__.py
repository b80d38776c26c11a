"""The command line: parse, call one function, print. No logic lives here, and only here is `print`."""
