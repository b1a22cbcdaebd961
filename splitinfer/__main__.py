"""``python -m splitinfer``: the command line."""

from splitinfer.cli import main

if __name__ == "__main__":
    main()
