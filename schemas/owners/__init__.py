"""One owner per output: it claims the output, builds it in a separate folder, and puts it in place as a whole."""
