# `make demo` translates, `make test` tests; each makes the environment that it needs, from nothing.
PYTHON ?= python3
MODEL ?= model_cards/vanilla-transformer-tiny-multi30k-en-de

define EXAMPLES
A brown dog is running through the snow.
Two young girls are playing with a red ball in the park.
A man in a blue shirt is standing on a ladder and cleaning a window.
endef
# As it was typed: a dollar in the text is no variable of make's.
override TEXT := $(or $(value TEXT),$(EXAMPLES))
export TEXT

.PHONY: demo test test-slow lint clean

demo: .venv/installed
	@printf '%s\n' "$$TEXT" | .venv/bin/vanilla-transformer translate --show-source $(MODEL)

test: .venv/installed
	.venv/bin/python -m pytest

# What takes long, and everything once more on the oldest supported versions.
test-slow: .venv/installed .venv-oldest/installed
	.venv/bin/python -m pytest -m slow
	.venv-oldest/bin/python -m pytest

lint: .venv/installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

.venv/installed: CONSTRAINTS = constraints/tested.txt
.venv-oldest/installed: CONSTRAINTS = constraints/oldest.txt

# torch goes first and alone: resolved together with the rest, pip may look at gigabytes of other builds of it.
.venv/installed .venv-oldest/installed: %/installed: pyproject.toml constraints/tested.txt constraints/oldest.txt
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) torch
	$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-oldest
