"""`python -m syncline`: the same as the command `syncline`."""

from syncline.cli.main import main

if __name__ == "__main__":
    main()
