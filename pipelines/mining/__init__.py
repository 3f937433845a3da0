"""Mine hard-negative tables: index blocks of vectors, search the blocks, merge and align the candidates."""
