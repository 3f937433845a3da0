"""Mine hard-negative tables: index blocks of vectors, search them, merge and align the candidates."""
