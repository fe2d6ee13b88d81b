"""`python -m workers`: the commands that need the model code. `promptmill` passes them on."""

from workers.cli import cli

if __name__ == "__main__":
    cli(prog_name="promptmill")
