# One command each. `make demo` needs neither root nor bubblewrap; the first use of each makes `.venv`.
.PHONY: demo test proof lint bench clean

bin := .venv/bin

# Compiled modules halve the start of every process; some environments turn them off.
unexport PYTHONDONTWRITEBYTECODE

demo:
	@scripts/setup run
	@$(bin)/holdwater run demo

# More processes than cores: many tests wait for a deadline, a kill or a daemon.
test:
	@scripts/setup dev
	@scripts/test-needs
	@$(bin)/pytest -m "not proof" --numprocesses 5 --dist loadgroup

proof:
	@scripts/setup dev
	@scripts/test-needs
	@scripts/proof-clients
	@$(bin)/pytest -m proof
	@$(bin)/pytest tests/fault/test_escape_*.py tests/docker/test_escape_*.py
	@$(bin)/python benchmarks/flat_memory.py
	@$(bin)/python benchmarks/throughput.py
	@$(bin)/python benchmarks/sandbox_start.py
	@$(bin)/python benchmarks/gateway_rate.py
	@$(bin)/python benchmarks/rollout_churn.py
	@$(bin)/python benchmarks/rollout_churn.py --hours 1
	@$(bin)/python benchmarks/admission.py
	@$(bin)/python benchmarks/crowding.py
	@$(bin)/python benchmarks/metering.py
	@$(bin)/python benchmarks/allocator.py
	@$(bin)/python benchmarks/image_assembly.py
	@$(bin)/python benchmarks/containers.py
	@$(bin)/python benchmarks/browsers.py
	@$(bin)/python benchmarks/openhands_sdk.py
	@$(bin)/python benchmarks/view.py
	@$(bin)/python benchmarks/soak.py --minutes 30

lint:
	@scripts/setup dev
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy
	@$(bin)/lint-imports

bench:
	@scripts/setup run
	@$(bin)/python benchmarks/flat_memory.py
	@$(bin)/python benchmarks/gateway_rate.py

clean:
	rm -rf .venv .clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
