"""Tables of rows by id that lie on parameter servers: `fd.RowTable`, for embeddings of any number of ids."""
