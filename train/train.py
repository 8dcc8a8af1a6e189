"""`vanilla-transformer train` as a script, for `accelerate launch` and for reading; `--help` says all."""

import typer

from vanilla_transformer.cli import train

if __name__ == "__main__":
    typer.run(train)
