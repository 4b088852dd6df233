"""Decide about a gang: when its processes start, what an end means, when they start again.

The processes of a gang compute together, so they live and die together: once one ends, the others
cannot go on, and all of them start again from the newest checkpoint. The supervisor is a table of
states and knows neither processes nor sockets; it takes messages and the time, and sends orders.

    gather ── all hosts are there ──► run ── a process ends, or a signal ──► end
      ▲                                                                       │ all have ended
      └──────── the pause is over ──────── pause ◄── a restart may cure it ───┤
                                                                              └─► over, with a code
"""

import signal
from collections.abc import Callable

from plurax.exit_codes import FINAL, ExitCode
from plurax.launch.events import Events
from plurax.launch.outcome import Exit, cause
from plurax.launch.protocol import EXIT, Message
from plurax.launch.settings import Settings

UNKILLABLE = "SIGKILL does not end process {}: perhaps its file system hangs"


class Supervisor:
    """Leads the hosts of a gang.

    **Arguments:** `settings`; `send`, which takes a host's index and an order; `events`;
    `coordinator`, which returns where JAX's coordination service of an attempt shall listen, on its
    first host; `now`, the time in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        send: Callable[[int, Message], None],
        events: Events,
        coordinator: Callable[[int], str],
        now: float,
    ) -> None:
        self._settings, self._send, self._events = settings, send, events
        self._coordinator = coordinator
        self._state, self._until = "gather", now + settings.limits.join
        self._hosts: dict[int, int] = {}
        self._gang: dict[int, list[int]] = {}
        self._exits: list[Exit] = []
        self._attempt, self._failures = settings.first_attempt - 1, 0
        self._saved: int | None = None
        self._start_step = 0
        self._asked: int | None = None
        self._askers: set[int] = set()
        self._killing = self._growing = False
        self.code: int | None = None

    def joined(self, host: int, processes: int, now: float, attempt: int = -1) -> None:
        """Take a host that can start a number of processes, and the last attempt that it saw."""
        self._hosts[host] = processes
        self._attempt = max(self._attempt, attempt) if not self._gang else self._attempt
        if self._settings.hosts > 1:
            sentence = f"host {host} of {self._settings.hosts} is here"
            self._events.write("joined", sentence, host=host, processes=processes)
        if self._state == "run" and host not in self._gang:
            self._growing = True
            count = _count(sum(map(len, self._gang.values())))
            self._events.write(
                "grow", f"host {host} is back: saving and stopping the {count}", host=host
            )
            self._signal(signal.SIGTERM, now)
        self.tick(now)

    def lost(self, host: int, reason: str, now: float) -> None:
        """Take that a host, and the processes on it, are gone."""
        self._hosts.pop(host, None)
        self._events.write("lost", f"host {host} is lost: {reason}", host=host, reason=reason)
        if self._state in ("run", "end"):
            self._lose(host, now)
        self.tick(now)

    def _lose(self, host: int, now: float) -> None:
        """Count the processes of a host as ended."""
        for process in self._living(host):
            self._process_ended(Exit(process, ExitCode.PEER_DIED, host, lost=True), now)

    def _living(self, host: int) -> list[int]:
        """Return the processes of a host that have not ended."""
        ended = {exit_.process for exit_ in self._exits}
        return [process for process in self._gang.get(host, ()) if process not in ended]

    def received(self, host: int, message: Message, now: float) -> None:
        """Take what a host reports."""
        if message["is"] != "asked" and message["attempt"] != self._attempt:
            return
        if message["is"] == "exit":
            if message["process"] not in self._living(host):
                return
            self._events.write("exit", **_fields(message), host=host)
            self._process_ended(Exit(host=host, **{name: message[name] for name in EXIT}), now)
        elif message["is"] == "progress":
            if self._saved is None or message["saved"] > self._saved:
                self._saved, self._failures = message["saved"], 0
        elif message["is"] == "asked":
            self.pass_on(signal.SIGINT if message["signal"] == 2 else signal.SIGTERM, now, host)
        elif message["is"] == "stuck":
            self._events.write("stuck", **_fields(message), host=host)
            self._end(now + self._settings.limits.aftermath, now)
        self.tick(now)

    def pass_on(self, number: int, now: float, host: int = 0) -> None:
        """Pass a signal on to all processes; a second one to the launcher of a host kills them.

        Slurm sends one to the launchers of all hosts, which counts as one.
        """
        name = signal.Signals(number).name
        again = host in self._askers
        self._askers.add(host)
        if self._asked is not None and not again:
            return
        if again:
            self._events.write("kill", f"a second signal ({name}): killing the {self._count()}")
            for host in self._gang:
                self._send(host, {"do": "kill", "stuck": False})
            return
        self._asked = number
        if self._state in ("gather", "pause"):
            self._over(128 + number, f"{name}, while no process was running")
            return
        self._events.write("signal", f"{name}: passed on to the {self._count()}", signal=name)
        if not self._growing:  # else they are saving already, and a second signal would end that
            self._signal(number, now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        settings, limits = self._settings, self._settings.limits
        if self._state == "pause" and now >= self._until:
            self._state = "gather"
            self._until = now + (limits.back if settings.elastic else limits.join)
        if self._state == "gather":
            least = settings.min_hosts if settings.elastic else settings.hosts
            enough = len(self._hosts) >= (least if now >= self._until else settings.hosts)
            if enough:
                self._start()
            elif now >= self._until:
                self._missing()
        if self._state == "end":
            if len(self._exits) == sum(map(len, self._gang.values())):
                self._conclude(now)
            elif self._killing and now >= self._until:  # not even SIGKILL has ended them
                self._give_up(now)
            elif now >= self._until:
                self._killing, self._until = True, now + limits.silence
                stuck = any(exit_.code == ExitCode.STUCK for exit_ in self._exits)
                for host in self._gang:
                    self._send(host, {"do": "kill", "stuck": stuck})

    def _give_up(self, now: float) -> None:
        """Go on without processes that SIGKILL does not end, as where a file system hangs."""
        if left := self._living(0):
            self._over(ExitCode.PERMANENT, UNKILLABLE.format(left[0]))
            return
        for host in [*self._gang]:
            if self._living(host):
                self._send(host, {"do": "drop"})
            self._lose(host, now)
        self._conclude(now)

    def _missing(self) -> None:
        """End, because hosts have not come."""
        missing = [host for host in range(self._settings.hosts) if host not in self._hosts]
        names = ("host " if len(missing) == 1 else "hosts ") + ", ".join(map(str, missing))
        sentence = f"{names} did not come in time; each host runs plurax launch with its own --host"
        self._over(ExitCode.PEER_DIED, sentence)

    def _signal(self, number: int, now: float) -> None:
        """Pass a signal on to all processes, and give them the time to save."""
        for host in self._gang:
            self._send(host, {"do": "signal", "signal": number})
        self._end(now + self._settings.limits.stop, now)

    def _start(self) -> None:
        self._attempt += 1
        self._state, self._exits = "run", []
        self._killing = self._growing = False
        self._start_step = self._saved or 0
        self._gang, first = {}, 0
        for host, processes in sorted(self._hosts.items()):
            self._gang[host] = [*range(first, first + processes)]
            first += processes
        order = {"do": "start", "attempt": self._attempt, "processes": first}
        order["coordinator"] = self._coordinator(min(self._gang))
        order["elastic"] = self._settings.elastic
        self._events.write("start", **_fields(order), hosts=[*self._gang])
        for host, own in self._gang.items():
            self._send(host, {**order, "first": own[0]})

    def _process_ended(self, ended: Exit, now: float) -> None:
        """Note an end, and give the others as long as they may need."""
        self._exits.append(ended)
        limits = self._settings.limits
        others = {int(ExitCode.DONE): limits.finish, int(ExitCode.PREEMPTED): limits.stop}
        seconds = others.get(ended.code, limits.aftermath)
        if ended.code > 128 and ended.code != ExitCode.PEER_DIED:
            seconds = limits.killed
        self._end(now + seconds, now)

    def _end(self, until: float, now: float) -> None:
        """Wait for the processes' end until some time, or until one that was set and is earlier."""
        self._until = until if self._state == "run" else min(until, self._until)
        self._state = "end"

    def _conclude(self, now: float) -> None:
        """Decide, now that all processes have ended."""
        first = cause(self._exits)
        if first is None:
            self._over(ExitCode.DONE, None)
            return
        sentence = first.sentence(len(self._gang))
        if self._asked is not None and first.ours:
            self._over(128 + self._asked, sentence)
        elif self._asked is not None or first.code in FINAL:
            self._over(first.code, sentence + _advice(first))
        elif self._growing and first.code == ExitCode.PREEMPTED:
            self._state, self._until = "pause", now
            self.tick(now)
        elif first.code < 64 and not self._stepped():
            self._over(first.code, f"{sentence}, before its first step: not restarted")
        elif self._failures >= self._settings.restarts:
            row = f"{self._failures} restarts in a row without a new checkpoint"
            self._over(first.code, f"{sentence}; not restarted: {row}")
        else:
            self._restart(first, sentence, now)

    def _restart(self, first: Exit, sentence: str, now: float) -> None:
        limits = self._settings.limits
        seconds = min(limits.backoff * 2**self._failures, limits.max_backoff)
        self._failures += 1
        source = "the start" if self._saved is None else f"the checkpoint of step {self._saved}"
        self._events.write(
            "restart",
            f"{sentence}; restarting the {self._count()} from {source} in {seconds:.3g} s "
            f"(restart {self._failures} of {self._settings.restarts})",
            attempt=self._attempt,
            process=first.process,
            host=first.host,
            code=first.code,
            saved=self._saved,
            seconds=seconds,
            restart=self._failures,
        )
        self._state, self._until = "pause", now + seconds

    def _stepped(self) -> bool:
        """Return whether this attempt went beyond what it started from."""
        return any((exit_.step or 0) > self._start_step for exit_ in self._exits)

    def _count(self) -> str:
        return _count(sum(map(len, self._gang.values())))

    def _over(self, code: int, sentence: str | None) -> None:
        self._state, self.code = "over", int(code)
        self._events.write(
            "over", sentence, code=int(code), attempt=self._attempt, saved=self._saved
        )


def _fields(message: Message) -> Message:
    """Return what a message says, without its kind."""
    return {key: value for key, value in message.items() if key not in ("is", "do")}


def _count(processes: int) -> str:
    return "process" if processes == 1 else f"{processes} processes"


def _advice(ended: Exit) -> str:
    """Return what to do about an end that is not restarted."""
    if ended.code != ExitCode.OUT_OF_MEMORY:
        return ""
    return (
        "; not restarted: the same plan would need the same memory. A plan with more zero, remat "
        "or microbatches needs less on each device, and more data or tensor divides it further; "
        "plurax plan FILE --search finds one"
    )
