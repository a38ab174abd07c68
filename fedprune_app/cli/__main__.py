"""``python -m fedprune_app.cli`` is the ``fedprune`` command."""

from fedprune_app.cli import main

if __name__ == "__main__":
    main()
