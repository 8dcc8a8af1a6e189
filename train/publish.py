"""`vanilla-transformer publish` as a script; `--help` says all."""

import typer

from vanilla_transformer.cli import publish

if __name__ == "__main__":
    typer.run(publish)
