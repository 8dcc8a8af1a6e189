"""`vanilla-transformer prepare` as a script, for `accelerate launch` and for reading; `--help` says all."""

import typer

from vanilla_transformer.cli import prepare

if __name__ == "__main__":
    typer.run(prepare)
