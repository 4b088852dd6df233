"""Machines that no plan can be estimated on."""

from collections.abc import Iterable

from plurax.errors import hints
from plurax.errors.kinds import MachineError, PlanError


def devices_are_absent(count: int, kind: str) -> PlanError:
    return PlanError(
        f"{count} x {kind} are described for their compiler (plurax.topology) and not here, so no "
        "state, batch or data can be placed on them, and nothing runs. What is compiled for them "
        "can be read: px.compile(...) has memory(), collectives() and hlo(), and "
        "plurax.analysis.compiled_for(function=...) compiles epochs, gradients, evaluation and "
        "prediction too. To run, leave devices= out."
    )


def machine_not_a_number(
    where: str, field: str, value: object, *, positive: bool = False
) -> MachineError:
    least = "above 0" if positive else "of at least 0"
    return MachineError(
        f"{where}: {field}={value!r}, and must be a finite number {least}, in flop/s, bytes, "
        "bytes/s or seconds without a prefix: 80 GB are 80e9."
    )


def machine_devices_not_whole(where: str, value: object, least: int) -> MachineError:
    return MachineError(
        f"{where}: {value!r} is not a number of devices or nodes; give a whole number of at least "
        f"{least}."
    )


def machine_efficiency_above_one(where: str, value: float) -> MachineError:
    return MachineError(
        f"{where}: efficiency={value!r}, and is the share of the peak rates that programs reach: "
        "at most 1."
    )


def machine_flops_not_rates(where: str, value: object) -> MachineError:
    return MachineError(
        f"{where}: flops={value!r}, and must be rates by dtype: "
        "{'float32': 156e12, 'bfloat16': 312e12}."
    )


def machine_unknown_dtype(where: str, dtype: object, known: Iterable[str]) -> MachineError:
    return MachineError(
        f"{where}: flops has a rate for {dtype!r}, which is none of the dtypes {', '.join(known)}."
    )


def machine_levels_do_not_nest(
    where: str, inner: str, inner_devices: int, outer: str, outer_devices: int
) -> MachineError:
    return MachineError(
        f"{where}: level {outer!r} of {outer_devices} devices does not hold whole groups of level "
        f"{inner!r}, of {inner_devices}. Levels come innermost first, each with a larger multiple "
        "of the devices before it: 8, 32."
    )


def machine_not_levels(where: str, given: Iterable[object]) -> MachineError:
    return MachineError(
        f"{where}: levels={given!r}, and must be levels of links: "
        "[plurax.analysis.Level('node', 8, bandwidth=300e9, latency=3.4e-6)]."
    )


def machine_not_tables(key: str, given: object) -> MachineError:
    return MachineError(
        f"{key}={given!r}, and must be tables, one [[{key}]] for each. A level is:\n\n"
        '    [[levels]]\n    name = "node"\n    devices = 8\n    bandwidth = 300e9\n'
        "    latency = 3.4e-6"
    )


def machine_key_in_groups(key: str) -> MachineError:
    return MachineError(
        f"{key!r} is beside [[groups]]. Where devices differ, each group has its own: write "
        f"{key!r} into every [[groups]]."
    )


def machine_groups_do_not_add_up(where: str, counts: Iterable[int], devices: int) -> MachineError:
    total = " + ".join(map(str, counts))
    return MachineError(
        f"{where}: its groups have {total} devices and its levels {devices}; give every device in "
        "one group."
    )


def machine_kind_not_one_device(where: str, kind: str, devices: int) -> MachineError:
    return MachineError(
        f"{where}: the kind {kind!r} of a group is a machine of {devices} devices, and must be one "
        "device: plurax.Machine.preset('A100-80GB'). The links are the whole machine's levels."
    )


def machine_devices_differ(name: str, counts: Iterable[tuple[int, str]]) -> MachineError:
    kinds = " and ".join(f"{count} × {kind}" for count, kind in counts)
    return MachineError(
        f"{name}: {kinds} would share one stage, and `data` and `tensor` give every device of a "
        "stage the same share of the work: all would wait for the slowest. Put devices that differ "
        "into different stages, with `pipeline`, or plan for one kind of them."
    )


def machine_unknown_key(kind: str, key: str, known: Iterable[str]) -> MachineError:
    known = list(known)
    hint = hints.did_you_mean(key, known)
    return MachineError(
        f"{key!r} is not a field of a {kind}.{hint} The fields are {', '.join(known)}."
    )


def machine_missing_key(kind: str, key: str) -> MachineError:
    return MachineError(f"a {kind} needs {key!r}, which is missing.")


def machine_in_a_file(source: str, error: MachineError) -> MachineError:
    return MachineError(f"{source} does not describe a machine: {error}")


def machine_not_toml(source: str, reason: str) -> MachineError:
    return MachineError(
        f"{source} is not a machine in TOML ({reason}). `plurax machine --preset 8xA100-80GB` "
        "prints one that can be edited."
    )


def machine_preset_unknown(name: str, known: Iterable[str]) -> MachineError:
    known = list(known)
    hint = hints.did_you_mean(name, known)
    return MachineError(
        f"there is no published machine {name!r}.{hint} There are {', '.join(known)}, and fewer "
        "devices of each: 4xA100-80GB, A100-80GB. plurax.Machine.load(path) reads a machine of "
        "your own."
    )


def machine_preset_too_large(name: str, kind: str, largest: int) -> MachineError:
    return MachineError(
        f"{name!r}: a node holds 1 to {largest} {kind}; more come as nodes: "
        f"plurax.Machine.preset('{largest}x{kind}', nodes=2)."
    )


def machine_too_small(name: str, devices: int, needed: int) -> MachineError:
    return MachineError(
        f"a collective over {needed} devices, and {name} has {devices}. Describe a machine of "
        "more nodes: plurax.Machine.preset('8xA100-80GB', nodes=4)."
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
