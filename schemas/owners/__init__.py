"""One owner per output, which claims the output, builds it in a separate folder, and moves it into place as a whole."""
