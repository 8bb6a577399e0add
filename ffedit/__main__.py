"""`python -m ffedit`."""

from ffedit.cli import main

if __name__ == "__main__":
    main()
