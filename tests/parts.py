"""Which tests belong to which part of the house: `make test PART=showing` runs one part's.

A part is what one person owns (CONTRIBUTING, *The house*). `whole` are the tests of everything
together: pages, examples, benchmarks, the rules of the house.

    python tests/parts.py showing    the test files of a part, on one line
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parent

# Names are of files in tests/unit, without `test_`; others are paths.
PARTS = {
    "engine": """
        tests/absent tests/hlo tests/parity tests/zoo batch batch_minor batch_size compact_layout
        compiler_options coupling cpu_forms drawn_programs export_predict fit hooks manual_axes
        hyperparams jaxpr large_numbers liveness loop_constants loops hlo_text machine
        masked_queries token_order split_sequences measured metrics plan planned population
        read_ahead recorded_collectives remat rows_per_call
        replicas resample schedules sharding stages step stream sweep targets task uncertainty
        verify work weights terminal
        user_frames argument_check error_texts mistakes reading replacing distributed yardstick
        over_batch""",
    "planning": """
        by_rules candidates corrections estimate expert_plans expert_weights fast_memory found
        found_plans golden_plans longest measure_machine partly_kept population_plans search
        search_exact search_stages""",
    "running": """
        tests/faults tests/processes tests/resume checkpoint compression coroutines elastic
        interleavings launch launch_hosts launch_ray locked_folder log log_check reaper replay
        residuals run_file servers shared_memory stop_signals watchdog""",
    "showing": """
        callbacks cli first_commands notebook notebooks progress report report_browser
        servers_picture timeline watch tests/test_pictures.py""",
    "data": "adapters sources tests/integrations",
    "whole": """
        tests/test_architecture.py tests/test_benchmarks.py tests/test_documents.py
        tests/test_examples.py tests/test_package.py tests/test_site.py tests/test_tiers.py""",
}


def paths(part: str) -> list[str]:
    """Return the test files and folders of a part, from the root of the repository."""
    return [name if "/" in name else f"tests/unit/test_{name}.py" for name in PARTS[part].split()]


if __name__ == "__main__":
    if sys.argv[1] not in PARTS:
        sys.exit(f"there is no part {sys.argv[1]!r}; the parts are {', '.join(PARTS)}")
    # These have environments of their own: `make test-integrations`, `make test-absent`.
    elsewhere = ("tests/integrations", "tests/absent")
    print(*(path for path in paths(sys.argv[1]) if path not in elsewhere))
