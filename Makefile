# Every target sets up what it needs, in this folder: `.venv` for Python, `.cache` for caches.
# The one thing to have is a Python 3.11 or newer, found by itself or named: make run PYTHON=/path/to/python3

PYTHONS := $(or $(PYTHON),python3.14 python3.13 python3.12 python3.11 python3)
DATA_FILE := ../shared/data/declarations.jsonl.gz
DATA := $(if $(wildcard $(DATA_FILE)),--data $(DATA_FILE))
BROKER ?= jetstream
PROTOCOL ?= classic
PROCESSES ?= 6
FAST := $(addprefix tests/,cli cohort core dead_letters history memsource observe runtime workers)
QUEUE := $(if $(WIDTH),--width $(WIDTH))
DEMO_jetstream := run nats -- .venv/bin/python -m demo run --server {nats} $(if $(MEMBERS),--members $(MEMBERS)) $(QUEUE)
DEMO_postgres := run postgres -- .venv/bin/python -m demo run --broker postgres --server {postgres} --members $(or $(MEMBERS),3) $(QUEUE) $(if $(RANGES),--ranges)
DEMO_kafka := run kafka -- .venv/bin/python -m demo run --broker kafka --server {kafka} --members $(or $(MEMBERS),3) --protocol $(PROTOCOL) $(QUEUE)
# The packages of the broker, without those of the others.
LEVEL := $(if $(filter-out jetstream,$(BROKER)),-$(BROKER))
# Without a broker named the soak simulates too; with one it is members of a group or a cohort under faults.
SOAK := tests.soak.$(if $(filter-out file,$(origin BROKER)),$(BROKER),simulation)
# Its makers' word on their next version, three times a build, is not about this site.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs
SERVE_jetstream := run nats -- sh -c 'trap "exit 0" INT; echo "export NATS_URL={nats}"; tail -f /dev/null & wait'
SERVE_postgres := run postgres -- sh -c 'trap "exit 0" INT; echo "export POSTGRES_URL={postgres}"; tail -f /dev/null & wait'
SERVE_kafka := run kafka -- sh -c 'trap "exit 0" INT; echo "export KAFKA_URL={kafka}"; tail -f /dev/null & wait'
DEMO := $(or $(DEMO_$(BROKER)),$(error BROKER=$(BROKER): must be jetstream, kafka or postgres))

ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/.cache/hypothesis

# Hundreds of processes are started: each would compile all it imports, where the environment forbids to keep that.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/pycache

.DEFAULT_GOAL := help
.PHONY: help run run-spark broker test test-fast test-slow test-spark campaign mutants check wheel workflows docs format bench fuzz soak model clean environment-run environment-run-kafka environment-run-postgres environment-run-spark environment-dev

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: environment-run$(LEVEL)  ## the demo on a real broker, with crashes [WIDTH=4 MEMBERS=3 BROKER=kafka|postgres PROTOCOL=consumer RANGES=1]
	@exec .venv/bin/python -m tests.components $(DEMO) $(DATA) $(ARGS)

run-spark: environment-run-spark  ## a replay on Spark with fenced effects, killed twice on the way, and its audit [ARGS="--events 5000"]
	@jars=$$(.venv/bin/python -m tests.components.spark_connector) && \
	exec .venv/bin/python -m tests.components run kafka postgres -- \
	  .venv/bin/python -m demo spark --kafka {kafka} --postgres {postgres} --jars "$$jars" $(DATA) $(ARGS)

broker: environment-run$(LEVEL)  ## a real broker to try things on, until Ctrl+C [BROKER=kafka|postgres]
	@exec .venv/bin/python -m tests.components $(SERVE_$(BROKER))

test: environment-dev  ## all tests but the slow ones and the campaign, on real servers [ARGS="-k demo" PROCESSES=6]
	@.venv/bin/python -m tests.project.rewritten
	@exec .venv/bin/python -m pytest -n $(PROCESSES) --dist worksteal $(ARGS)

test-fast: environment-dev  ## the tests without a broker or a child process, after each edit [ARGS="-k ledger"]
	@.venv/bin/python -m tests.project.rewritten
	@exec .venv/bin/python -m pytest --fast -m "not slow and not campaign" -n 4 --dist worksteal $(FAST) $(ARGS)

campaign: environment-dev  ## all runs of sliced tests, 20,000 simulated schedules of whole consumers, 5,000 of each real adapter and as many with ranges, 2,000 with changes of a width; the last line is JSON [SCHEDULES=5000]
	$(if $(ARGS),,@.venv/bin/python -m pytest -m "(sliced or hypothesis) and not slow" --hypothesis-profile full -n 2 --dist worksteal)
	@SCHEDULES=$(SCHEDULES) exec .venv/bin/python -m pytest -m campaign -p tests.simulated.figures -n 2 --dist worksteal tests/memsource/sim/test_campaign.py tests/memsource/sim/test_width_campaign.py tests/simulated $(ARGS)

test-slow: environment-dev  ## the tests that take minutes, on real servers [ARGS="-k demo"]
	@exec .venv/bin/python -m pytest -m slow $(ARGS)

test-spark: environment-dev  ## all tests of Spark and PostgreSQL, the slow ones too [ARGS="-k audit"]
	@exec .venv/bin/python -m pytest -m "slow or not slow" tests/spark tests/postgres tests/demo/test_spark*.py $(ARGS)

mutants: environment-dev  ## the mutation score of each file, for hours [FILES="core lanes/cohort" ARGS="--every 10"]
	@exec .venv/bin/python -m tests.mutants.score $(FILES) $(ARGS)

check: environment-dev  ## lint, types, imports, docstrings, the list of errors, the site
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/pydoclint --quiet lanes adapters memsource demo
	.venv/bin/lint-imports --cache-dir .cache/import-linter
	.venv/bin/python -m tests.project.messages compare
	$(MKDOCS) build --strict

wheel: environment-dev  ## install the wheel in empty environments of the oldest and the newest Python, and run the README's programs
	@exec .venv/bin/python -m tests.project.wheel

# Go is not needed for anything else, so its absence only skips this check.
workflows:  ## check the workflows of GitHub with actionlint, which Go builds in .cache
	@if ! PATH="$$PATH:/usr/local/go/bin" GOBIN=$(CURDIR)/.cache/go GOFLAGS=-mod=mod go install $(ACTIONLINT) 2>/dev/null; then \
	  echo "the workflows are not checked: Go is missing, or cannot build $(ACTIONLINT)"; \
	else .cache/go/actionlint .github/workflows/*.yml && echo "the workflows have no fault"; fi

docs: environment-dev  ## the documentation as a site, with the reference of the API, in .cache/site [ARGS=serve]
	@$(MKDOCS) $(or $(ARGS),build --strict)
	@$(if $(ARGS),,echo "open .cache/site/index.html")

format: environment-dev  ## let ruff format, and mend what it can
	.venv/bin/python -m ruff format .
	.venv/bin/python -m ruff check --fix .

bench: environment-dev  ## measure [CASES="engine"]
	@exec .venv/bin/python -m bench $(CASES)

fuzz: environment-dev  ## random attacks on the engine [SECONDS=60]
	@exec .venv/bin/python -m fuzz --seconds $(or $(SECONDS),60)

soak: environment-dev  ## a long run under faults on a real broker [SECONDS=600 BROKER=kafka|postgres RANGES=1]
	@exec .venv/bin/python -m $(SOAK) --seconds $(or $(SECONDS),600) $(if $(RANGES),--ranges)

model:  ## check the models of the cohort's protocol, of ring ranges, of a change of width and of transactions with SPIN, which has to be there: 7 minutes
	@bash docs/model/widths.sh && bash docs/model/transactions.sh && bash docs/model/ranges.sh && exec bash docs/model/cohort.sh

clean:  ## remove the environment and every cache
	rm -rf .venv .cache build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

environment-run environment-run-kafka environment-run-postgres environment-run-spark environment-dev: environment-%:
	@.venv/bin/python -m tests.components.environment ready $* 2>/dev/null && exit 0; \
	for python in $(PYTHONS); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    exec $$python -m tests.components.environment make $*; \
	  fi; \
	done; \
	echo "lanes: needs Python 3.11 or newer, looked for: $(PYTHONS). Install one, or name it: PYTHON=/path/to/python3" >&2; \
	exit 1
