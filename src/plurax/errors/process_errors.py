"""Messages about the processes of a gang."""

from collections.abc import Sequence

from plurax.errors.kinds import PeerError, PlanError, ProcessError


def coordinator_not_an_address(given: str) -> ProcessError:
    return ProcessError(
        f"coordinator={given!r} is no address. Write the host of process 0 and a free port of it: "
        "coordinator='host0:1234'."
    )


def processes_not_positive(given: object) -> ProcessError:
    return ProcessError(f"processes={given!r} must be a positive whole number, such as 2.")


def process_not_there(index: object, count: int) -> ProcessError:
    return ProcessError(
        f"process={index!r} is not one of {count} processes: they are numbered 0 to {count - 1}."
    )


def gang_variable_missing(missing: Sequence[str], names: Sequence[str]) -> ProcessError:
    return ProcessError(
        f"the environment has some of {', '.join(names)}, and not {', '.join(missing)}. "
        "`plurax launch` sets all of them; unset them all to train in one process."
    )


def gang_variable_not_a_number(name: str, given: str) -> ProcessError:
    return ProcessError(f"the environment variable {name}={given!r} must be a whole number.")


def initialize_incomplete(missing: Sequence[str]) -> ProcessError:
    return ProcessError(
        f"plurax.initialize needs {' and '.join(missing)} too: "
        "plurax.initialize('host0:1234', processes=2, process=0). Under `plurax launch` and "
        "`srun` give no arguments."
    )


def initialized_twice() -> ProcessError:
    return ProcessError(
        "the processes are joined already. Call plurax.initialize() once, and not after "
        "jax.distributed.initialize()."
    )


def initialized_too_late() -> ProcessError:
    return ProcessError(
        "plurax.initialize() comes too late: JAX has been used in this process. Call it first, "
        "before any array is created and before jax.devices()."
    )


def coordinator_port_taken(coordinator: str, why: str) -> PeerError:
    return PeerError(
        f"process 0 cannot listen at {coordinator} for the others: {why}. `plurax launch` starts "
        "all of them again with another port; by hand, give a coordinator with a free one."
    )


def gang_not_joined(coordinator: str, process: int, why: str) -> ProcessError:
    return ProcessError(
        f"process {process} could not join the others at {coordinator}: {why}. Does process 0 run "
        "on that host, is the port free and open between the hosts, and do all processes give the "
        "same number of processes?"
    )


def host_name_is_loopback(name: str, coordinator: str) -> ProcessError:
    return ProcessError(
        f"this host's name, {name}, resolves to its loopback address, and JAX's collectives "
        f"between CPUs give that to the other hosts (the coordinator is {coordinator}). Give the "
        "name its real address in /etc/hosts of this host."
    )


def process_ended(who: str) -> PeerError:
    return PeerError(
        f"{who} has ended, so this one cannot go on. Its own output says why; the newest "
        "checkpoint is kept, and `plurax launch` restarts all of them from it."
    )


def process_late(who: str, seconds: float) -> PeerError:
    return PeerError(
        f"{who} did not take part for {seconds:.0f} s, while the others waited for it. It may "
        "hang, or do something that the others do not: every process must make the same calls."
    )


def process_not_reached(address: str, why: str) -> ProcessError:
    return ProcessError(
        f"process 0 could not be reached at {address}: {why}. The hosts must reach each other at "
        "all ports."
    )


def processes_not_connected(missing: Sequence[int], seconds: float) -> ProcessError:
    return ProcessError(
        f"process {', '.join(map(str, missing))} did not connect within {seconds:.0f} s. The hosts "
        "must reach each other at all ports."
    )


def process_failed(who: str, kind: str, text: str) -> ProcessError:
    return ProcessError(f"{who} failed, so all of them stop: {kind}: {text}")


def plan_leaves_processes_out(plan: str, devices: int, processes: int) -> PlanError:
    return PlanError(
        f"{plan} uses {devices} devices, which {processes} processes cannot share equally. Every "
        f"process has to take part: use a multiple of {processes} devices, or fewer processes."
    )


def devices_of_a_gang(given: str) -> ProcessError:
    return ProcessError(
        f"--devices {given} is for one process. Say how many devices each of several processes has "
        "where they are started: plurax launch --processes 2 --devices 4 -- train FILE."
    )


def parallel_sweep_of_processes(num_parallel: int, processes: int) -> PlanError:
    return PlanError(
        f"num_parallel={num_parallel} is for one process, and there are {processes}. Leave it out: "
        "each bucket has the devices of all processes, one after another."
    )


def one_process_only(what: str, processes: int, instead: str) -> ProcessError:
    return ProcessError(f"{what} is for one process, and there are {processes}. {instead}")
