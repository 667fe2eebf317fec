"""``python -m polyvision``: what the command ``polyvision`` does."""

from polyvision.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
