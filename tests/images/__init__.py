"""Images built from the Dockerfile without a daemon, and run: `make images`."""
