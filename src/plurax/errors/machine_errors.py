"""Machines that no plan can be estimated on."""

from collections.abc import Iterable

from plurax.errors.kinds import MachineError, PlanError


def devices_are_absent(count: int, kind: str) -> PlanError:
    return PlanError(
        f"{count} x {kind} are described for their compiler (plurax.topology) and not here, so no "
        "state, batch or data can be placed on them, and nothing runs. What is compiled for them "
        "can be read: px.compile(...) has memory(), collectives() and hlo(), and "
        "plurax.analysis.compiled_for(function=...) compiles epochs, gradients, evaluation and "
        "prediction too. To run, leave devices= out."
    )


def machine_devices_not_whole(where: str, value: object, least: int) -> MachineError:
    return MachineError(
        f"{where}: {value!r} is not a number of devices or nodes; give a whole number of at least "
        f"{least}."
    )


def machine_groups_do_not_add_up(where: str, counts: Iterable[int], devices: int) -> MachineError:
    total = " + ".join(map(str, counts))
    return MachineError(
        f"{where}: its groups have {total} devices and its levels {devices}; give every device in "
        "one group."
    )


def machine_missing_key(kind: str, key: str) -> MachineError:
    return MachineError(f"a {kind} needs {key!r}, which is missing.")


def machine_not_toml(source: str, reason: str) -> MachineError:
    return MachineError(
        f"{source} is not a machine in TOML ({reason}). `plurax machine --preset 8xA100-80GB` "
        "prints one that can be edited."
    )


def machine_wrong_type(given: object) -> MachineError:
    return MachineError(
        f"machine={given!r}, and must be a plurax.Machine: "
        "plurax.Machine.preset('8xA100-80GB'), plurax.Machine.load('here.toml'), or "
        "plurax.analysis.measure_machine()."
    )


def run_without_predictions(run: str) -> MachineError:
    return MachineError(
        f"--runs {run}: nothing in its metrics.jsonl was both predicted and timed. Train it with "
        "--machine, for more steps than the first: plurax train FILE --machine here.toml."
    )


def nodes_without_preset(nodes: int, option: str) -> MachineError:
    return MachineError(
        f"--nodes {nodes} is for published hardware: {option} 8xA100-80GB --nodes {nodes}. A "
        "measured machine is the one at hand; levels beyond it can be written into its file."
    )
