"""`python -m extremis`, the same as the console script `extremis`."""

from extremis.cli import main

if __name__ == "__main__":
    main()
