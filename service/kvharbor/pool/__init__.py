"""Cache policy: blocks, prefix tree, eviction, sequences, sessions. Synchronous, no I/O, no clock."""

from kvharbor.pool.awaiting import Awaited as Awaited
from kvharbor.pool.awaiting import Outlook as Outlook
from kvharbor.pool.block_runs import BlockRun as BlockRun
from kvharbor.pool.block_runs import Chain as Chain
from kvharbor.pool.digest import ExtraKey as ExtraKey
from kvharbor.pool.engines import Engine as Engine
from kvharbor.pool.engines import EngineGroup as EngineGroup
from kvharbor.pool.engines import EngineStats as EngineStats
from kvharbor.pool.hints import ExpectedReuse as ExpectedReuse
from kvharbor.pool.hints import Hints as Hints
from kvharbor.pool.ledger import Ledger as Ledger
from kvharbor.pool.ledger import ledger_bytes as ledger_bytes
from kvharbor.pool.misses import Miss as Miss
from kvharbor.pool.misses import MissKind as MissKind
from kvharbor.pool.policies import POLICIES as POLICIES
from kvharbor.pool.pool import Pool as Pool
from kvharbor.pool.results import (
    Acquired as Acquired,
)
from kvharbor.pool.results import (
    Adopted as Adopted,
)
from kvharbor.pool.results import (
    Commit as Commit,
)
from kvharbor.pool.results import (
    Committed as Committed,
)
from kvharbor.pool.results import (
    Extension as Extension,
)
from kvharbor.pool.results import (
    Fork as Fork,
)
from kvharbor.pool.results import (
    HandedOff as HandedOff,
)
from kvharbor.pool.results import (
    Held as Held,
)
from kvharbor.pool.results import (
    Holding as Holding,
)
from kvharbor.pool.results import (
    Invalidated as Invalidated,
)
from kvharbor.pool.results import (
    Pending as Pending,
)
from kvharbor.pool.results import (
    PinView as PinView,
)
from kvharbor.pool.results import (
    PoolConfig as PoolConfig,
)
from kvharbor.pool.results import (
    Presence as Presence,
)
from kvharbor.pool.results import (
    Prompt as Prompt,
)
from kvharbor.pool.results import (
    Recovered as Recovered,
)
from kvharbor.pool.results import (
    Resumed as Resumed,
)
from kvharbor.pool.results import (
    SequenceView as SequenceView,
)
from kvharbor.pool.results import (
    Shadow as Shadow,
)
from kvharbor.pool.results import (
    Usage as Usage,
)
from kvharbor.pool.results import (
    Warmed as Warmed,
)
from kvharbor.pool.stats import PinStats as PinStats
from kvharbor.pool.stats import PoolStats as PoolStats
from kvharbor.pool.stats import TenantStats as TenantStats
from kvharbor.pool.stats import Times as Times
from kvharbor.pool.stats import TrafficStats as TrafficStats
