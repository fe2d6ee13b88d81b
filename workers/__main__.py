"""`python -m workers`: the commands that need the model code. `promptmill` passes them on."""

import atexit
import gc

from workers.cli import cli

if __name__ == "__main__":
    atexit.register(gc.freeze)  # as in jobs/cli.py
    cli(prog_name="promptmill")
