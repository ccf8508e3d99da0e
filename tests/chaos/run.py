"""One run: everything is started, struck by the schedule, ended, and counted."""

import time
from collections import deque
from pathlib import Path

from chaos.board import Board, Count, Head
from chaos.crowd import Crowd
from chaos.killer import Killer
from chaos.observer import PERIOD_S
from chaos.owner import Owner
from chaos.points.marks import MARKS
from chaos.reactor import Reactor
from chaos.report import Report
from chaos.schedule import STANDBY_S, Size, strikes
from chaos.times import Times, quantile
from chaos.witness import Witnesses

_WARM_UP_S = 2.0
_LOOK_S = 0.5
_STEADY_LOOKS = 6


class Run:
    """The harness. `report` is filled as it goes."""

    def __init__(self, size: Size, seed: int, folder: Path) -> None:
        self._size = size
        self.report = Report(seed)
        self._reactor = Reactor()
        self._board = Board.create(folder / "board")
        self._times = Times()
        self.owner = Owner(self._reactor, folder, self._board, self._owner_died)
        self._crowd = Crowd(
            self._reactor,
            folder / "board",
            self.owner.target,
            seed=seed,
            size=size.workers,
            wrong=self._wrong,
        )
        self._witnesses = Witnesses(self._reactor, self.owner.target, self._times, self._wrong)
        self._killer = Killer(self._reactor, self.owner, self._crowd, self._witnesses, self._times, self.report)

    def go(self) -> None:
        """Runs it all, up to the first fault."""
        started = time.monotonic()
        try:
            self._begin()
            for strike in strikes(self._size, self.report.seed, list(MARKS)):
                self._reactor.run_for(strike.after_s)
                self._killer.strike(strike)
                if self.report.faults:
                    break
            else:
                self._killer.make_up(self._size)
            self._end()
        finally:
            self._crowd.kill()
            self._witnesses.kill()
            self.owner.kill()
        self.report.duration_s = time.monotonic() - started
        self._sum_up()

    def _begin(self) -> None:
        self.owner.start()
        self._witnesses.ask("plant")
        self._killer.await_service()
        self._crowd.start()
        self._reactor.run_for(_WARM_UP_S)
        self._usage = self._settled_usage()

    def _end(self) -> None:
        self._killer.await_service()
        self._killer.check()
        growth = [after - before for before, after in zip(self._usage, self._settled_usage(), strict=True)]
        self.report.rss_growth_bytes, self.report.fd_growth = growth
        # With all sessions there: nothing may be held that their clients do not know of.
        self._crowd.pause(letting_go=True)
        counts = self._witnesses.ask("settle")
        self._crowd.leave()
        if counts:
            self.report.leaked_blocks = counts["total"] - counts["free"] - counts["cached"] - counts["warm"]
            self.report.left_private_blocks = self._witnesses.ask("left_private").get("count", 0)
            counts = self._witnesses.ask("clear")
            self.report.leaked_blocks += counts["total"] - counts["free"] if counts else 0
        self._witnesses.end()
        self.report.owner_kills = self._times.warm_kill_count()
        self.report.standby_kills = len(self._times.standby_deaths)
        self.report.upgrades = self._times.upgrades
        self.report.supervisor_kills = self._times.supervisor_deaths
        self.report.faults += self.owner.stop()

    def _settled_usage(self) -> tuple[int, int]:
        """Returns what supervisor and child take when as many sessions as there are workers have just resumed."""
        self._crowd.pause()
        if self._size.owner_kills:
            self._killer.kill_owner()
        looks = deque([self.owner.usage()], maxlen=_STEADY_LOOKS)
        # The next child is made a second later, and sessions come back in their own time.
        while len(looks) < _STEADY_LOOKS or len({descriptors for _, descriptors in looks}) > 1:
            self._reactor.run_for(_LOOK_S)
            looks.append(self.owner.usage())
        self._crowd.go_on()
        return looks[-1]

    def _sum_up(self) -> None:
        report, board = self.report, self._board
        undisturbed, disturbed = self._times.reclaims(self._crowd.deaths)
        warm_outages = [outage for outage in self._times.outages() if not outage.cold]
        recoveries = [outage.over - outage.last_death for outage in warm_outages]
        with_standby = [
            outage.over - outage.last_death for outage in warm_outages if self._times.had_standby(outage, STANDBY_S)
        ]
        outages = [outage.over - outage.first_death for outage in warm_outages]
        cold_starts = [outage.over - outage.last_death for outage in self._times.outages() if outage.cold]
        report.worker_kills = self._crowd.kills
        for count in Count:
            figure = count.name.lower()
            setattr(report, figure, getattr(report, figure) + board.total(count))
        report.invariants_checked = board.head(Head.CHECKS) + self._witnesses.checked.get("count", 0)
        report.evicted_blocks = self._witnesses.checked.get("evicted", 0)
        report.reclaim_samples, report.recovery_samples = len(undisturbed), len(recoveries)
        report.reclaim_p50_s, report.reclaim_p99_s = quantile(undisturbed, 0.5), quantile(undisturbed, 0.99)
        report.reclaim_across_restart_p50_s = quantile(disturbed, 0.5)
        report.reclaim_across_restart_p99_s = quantile(disturbed, 0.99)
        report.reclaim_resolution_s = PERIOD_S
        report.recovery_p50_s, report.recovery_p99_s = quantile(recoveries, 0.5), quantile(recoveries, 0.99)
        report.recovery_standby_p50_s = quantile(with_standby, 0.5)
        report.recovery_standby_p99_s = quantile(with_standby, 0.99)
        report.outage_p99_s = quantile(outages, 0.99)
        report.cold_start_p99_s = quantile(cold_starts, 0.99)

    def _owner_died(self) -> None:
        self._times.owner_deaths.append(time.monotonic())
        self._witnesses.note_death()

    def _wrong(self, kind: str, text: str) -> None:
        self.report.wrong_bytes += kind == "wrong"
        # With its supervisor the service loses all state: that is promised to nobody.
        if kind != "lost" or not self._times.supervisor_deaths:
            self.report.faults.append(f"{kind}: {text}")
