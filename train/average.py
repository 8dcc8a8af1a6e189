"""`vanilla-transformer average` as a script, for `accelerate launch` and for reading; `--help` says all."""

import typer

from vanilla_transformer.cli import average

if __name__ == "__main__":
    typer.run(average)
