"""Strikes, one after the other, and what is looked at after each."""

import signal
import time

from chaos.crowd import Crowd
from chaos.owner import Owner
from chaos.reactor import Reactor
from chaos.report import Report
from chaos.schedule import LONGEST_STOP_S, Means, Size, Strike, Target
from chaos.times import Times
from chaos.witness import Witnesses

_BACK_S = 30.0
_STOPS = frozenset({Means.STOP, Means.STOP_AND_KILL, Means.BUSY_STOP, Means.BUSY_STOP_AND_KILL})
# One compares what is before with what is after, the other ends calls under way.
_OF_A_SERVICE = frozenset({Means.QUIET_KILL, Means.UPGRADE})


class Killer:
    """Does what the schedule says."""

    def __init__(
        self, reactor: Reactor, owner: Owner, crowd: Crowd, witnesses: Witnesses, times: Times, report: Report
    ) -> None:
        self._reactor = reactor
        self._owner = owner
        self._crowd = crowd
        self._witnesses = witnesses
        self._times = times
        self._report = report
        self._unchecked = False

    def strike(self, strike: Strike) -> None:
        """Strikes once."""
        if strike.target is Target.WORKER:
            self._strike_worker(strike)
            return
        if strike.rest_s is not None or strike.means in _OF_A_SERVICE or strike.target is Target.SUPERVISOR:
            self.await_service()
            self.check()
            self._reactor.run_for(max(0.0, self._times.returns[-1] + (strike.rest_s or 0.0) - time.monotonic()))
        if strike.target is Target.OWNER:
            self._strike_owner(strike)
        else:
            self._strike_supervisor(strike)

    def make_up(self, size: Size) -> None:
        """Kills as many as were wanted and got away, e.g. because they had just died."""
        self._reactor.run_for(LONGEST_STOP_S)
        while self._crowd.kills < size.worker_kills and not self._report.faults:
            self._crowd.strike(self._crowd.kills % size.workers, signal.SIGKILL)
            self._reactor.run_for(size.mean_pause_s)
        while self._times.warm_kill_count() < size.owner_kills and not self._report.faults:
            self.kill_owner()

    def kill_owner(self) -> None:
        """Kills the service's process, and waits until it is back."""
        deaths = len(self._times.owner_deaths)
        self._owner.strike(signal.SIGKILL)
        self._reactor.run_until(lambda: len(self._times.owner_deaths) > deaths, _BACK_S)
        self.await_service()

    def await_service(self) -> None:
        """Waits for the service's return from its last death."""
        if not self._reactor.run_until(self._times.serves, _BACK_S):
            self._report.faults.append(f"the service was not back after {_BACK_S} s")

    def check(self) -> None:
        """Has the canary look, if there was a death since it last did."""
        if self._unchecked:
            self._unchecked = False
            answer = self._witnesses.ask("check")
            self._report.lost_committed_blocks += answer.get("lost", 0)
            self._report.blocks_verified += answer.get("checked", 0)

    def _strike_worker(self, strike: Strike) -> None:
        slot, stop_s = strike.slot, strike.stop_s
        then = signal.SIGCONT if strike.means in (Means.STOP, Means.BUSY_STOP) else signal.SIGKILL
        if strike.means in _STOPS:
            self._report.worker_stops += 1
        if strike.means in (Means.STOP, Means.STOP_AND_KILL):
            self._crowd.strike(slot, signal.SIGSTOP)
            self._reactor.after(stop_s, lambda: self._crowd.strike(slot, then))
        elif strike.means in (Means.BUSY_STOP, Means.BUSY_STOP_AND_KILL):
            self._crowd.have_strike_itself(slot, signal.SIGSTOP, stop_s=stop_s, then=then)
        elif strike.means is Means.BUSY_KILL:
            self._crowd.have_strike_itself(slot, signal.SIGKILL)
        else:
            self._crowd.strike(slot, signal.SIGTERM if strike.means is Means.TERM else signal.SIGKILL)

    def _strike_owner(self, strike: Strike) -> None:
        if strike.means is Means.STANDBY_KILL:
            if self._owner.strike_standby():
                self._times.standby_deaths.append(time.monotonic())
            return
        self._unchecked = True
        if strike.means is Means.MARK:
            if self._owner.strike_at(strike.mark, strike.passes):
                self._report.marked_kills[strike.mark] = self._report.marked_kills.get(strike.mark, 0) + 1
                return
            # It did not come by: whatever it is at instead is as good an instant.
            self._owner.strike(signal.SIGKILL)
        elif strike.means is Means.QUIET_KILL:
            self._kill_quietly()
        elif strike.means is Means.KILL:
            self._owner.strike(signal.SIGKILL)
        elif strike.means is Means.UPGRADE:
            self._upgrade()
        else:
            self._owner.strike(signal.SIGSTOP)
            self._report.owner_stops += 1
            self._times.owner_stops.append((time.monotonic(), time.monotonic() + strike.stop_s))
            number = signal.SIGCONT if strike.means is Means.STOP else signal.SIGKILL
            self._reactor.after(strike.stop_s, lambda: self._owner.strike(number))

    def _kill_quietly(self) -> None:
        """Kills while nothing is under way: the index afterwards must be the one before, block for block."""
        self._crowd.pause()
        before = self._witnesses.ask("snapshot").get("index", {})
        self.kill_owner()
        after = self._witnesses.ask("snapshot").get("index", {})
        self._report.indexes_compared += 1
        self._report.index_entries_compared += len(before)
        lost = [digest for digest, places in before.items() if after.get(digest) != places]
        self._report.lost_committed_blocks += len(lost)
        if made_up := after.keys() - before.keys():
            self._report.faults.append(f"{len(made_up)} blocks are in the index that were not before the kill")
        self._crowd.go_on()

    def _upgrade(self) -> None:
        """Has the service's process replaced in good order."""
        deaths = len(self._times.owner_deaths)
        self._owner.upgrade()
        if self._reactor.run_until(lambda: len(self._times.owner_deaths) > deaths, _BACK_S):
            self._times.upgrades += 1
        else:
            self._report.faults.append(f"the service was not upgraded in {_BACK_S} s")
        self.await_service()

    def _strike_supervisor(self, strike: Strike) -> None:
        if strike.means is Means.STOP:
            self._owner.stop_supervisor(strike.stop_s)
            return
        status = self._owner.end_supervisor(signal.SIGTERM if strike.means is Means.TERM else signal.SIGKILL)
        if strike.means is Means.TERM and status:
            self._report.faults.append(f"the supervisor ended with {status} after SIGTERM")
        self._times.supervisor_deaths += 1
        self._owner.start()
        self.await_service()
        self._witnesses.ask("plant")
