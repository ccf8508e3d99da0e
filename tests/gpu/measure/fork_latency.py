"""How long a fork takes through the service, with a tail to copy and without one."""

import tempfile
from pathlib import Path
from statistics import quantiles

from bench.figures import seconds
from gpu.measure.question import Answer, Figures
from gpu.rig import ARENAS, Rig
from kvharbor.client import Pool, connect
from kvharbor.gpumem import DataType, Layout
from service_process import ServiceProcess

TOKENS = 64


def ask(rig: Rig) -> Answer:
    """Forks a prompt that ends within a block, and one that ends with one, by turns."""
    figures: Figures = {arena: _forked(rig, arena) for arena in ARENAS}
    said = [
        f"{arena}: {seen['with_copy_ms']['median']} ms with a copied tail of {seen['block_bytes'] / 2**20:.3g} MiB, "
        f"{seen['without_copy_ms']['median']} ms without"
        for arena, seen in figures.items()
    ]
    return Answer("; ".join(said), figures)


def _forked(rig: Rig, arena: str) -> Figures:
    layout = Layout.attention("forks", rig.sized(32, 2), 8, 128, DataType.FLOAT16, TOKENS)
    flags = [f"--arena={arena}", f"--cuda-runtime={rig.cuda.runtime}", f"--memory={40 * layout.block_bytes}B"]
    with (
        tempfile.TemporaryDirectory(prefix="kvharbor-gpu-") as folder,
        ServiceProcess(Path(folder) / "kv.sock", *flags, environment=rig.cuda.environment) as service,
    ):
        service.wait_for("ready")
        with connect(service.target) as harbor:
            pool = harbor.open_pool("forks", layout, size=39 * layout.block_bytes)
            rounds = rig.sized(200, 5)
            times = [(_fork_s(pool, TOKENS + TOKENS // 2), _fork_s(pool, 2 * TOKENS)) for _ in range(rounds)]
        service.stop()
    with_copy, without_copy = zip(*times, strict=True)
    return {
        "block_bytes": layout.block_bytes,
        "with_copy_ms": _spread_ms(with_copy),
        "without_copy_ms": _spread_ms(without_copy),
    }


def _fork_s(pool: Pool, token_count: int) -> float:
    with pool.allocate(range(token_count)) as parent:
        parent.commit(token_count)
        children = []
        taken_s = seconds(lambda: children.extend(parent.fork(1)))
        for child in children:
            child.release()
    return taken_s


def _spread_ms(times: tuple[float, ...]) -> Figures:
    cuts = quantiles(times, n=100, method="inclusive")
    return {"median": round(cuts[49] * 1e3, 3), "p99": round(cuts[98] * 1e3, 3)}
