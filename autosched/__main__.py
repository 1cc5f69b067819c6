"""``python -m autosched``."""

from autosched.cli import main

main()
