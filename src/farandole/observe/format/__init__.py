"""The records on disk: rows, their short form, and which of them a long run keeps."""
