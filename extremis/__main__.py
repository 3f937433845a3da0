"""`python -m extremis` and the console script."""

from extremis.cli import main

if __name__ == "__main__":
    main()
