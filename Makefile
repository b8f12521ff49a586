# The commands of the README. Each builds .venv from constraints.txt the first time, and needs no GPU.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo test serve clean

demo: $(STAMP)
	$(VENV)/bin/python -m pocket.demo --out out/demo.png

test: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n auto --dist loadgroup

serve: $(STAMP)
	$(VENV)/bin/underpaint serve pocket/qwen-image-2.1

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) out
